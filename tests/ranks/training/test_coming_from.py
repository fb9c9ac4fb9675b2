"""docs/coming_from.md: loops of Colossal-AI, Paddle and torchgpipe, on one and two ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

PAGE = Path(__file__).parents[3] / "docs/coming_from.md"


def run_block(name: str, folder: str, pipeline: int) -> Any:
    """Run the function `name` of the page on this rank; return what a test compares."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {"__name__": PAGE.stem}
    with pytest.MonkeyPatch.context() as patch, handlers_restored():
        patch.chdir(folder)
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
        torch.manual_seed(0)
        return RESULTS[name](names[name]({"pipeline": pipeline, "device": "cpu"}))


def evaluated(trainer: Any) -> dict[str, Any]:
    return {
        "evaluations": trainer.evaluations,
        "steps": trainer.engine.global_steps,
        "samples": trainer.engine.consumed_samples,
        "rate": trainer.engine.lr_scheduler and trainer.engine.lr_scheduler.get_last_lr(),
    }


RESULTS: dict[str, Callable[[Any], Any]] = {
    "train_with_hooks": evaluated,
    "train_with_warmup": evaluated,
    "train_with_own_loop": lambda loss: loss,
    "train_whole_batches": lambda pair: (
        pair[0],
        None if pair[1] is None else [output.tolist() for output in pair[1]],
    ),
    "train_from_dataset": evaluated,
    "train_module": lambda losses: losses,
    "train_by_gpipe": lambda loss: loss,
}


def run_on(pool: RankPool, name: str, folder: Path, ranks: int) -> list[Any]:
    where = folder / str(ranks)
    where.mkdir()
    return pool.run(ranks, run_block, name, str(where), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_with_metrics_takes_the_place_of_hooks(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    first, *others = run_on(pool, "train_with_hooks", tmp_path, ranks)
    # 100 samples in batches of 32: three whole steps and one of 4 samples, in each of two epochs.
    assert (first["steps"], first["samples"]) == (8, 200)
    assert first["rate"] == [pytest.approx(0.1 * 0.5**2)]
    last = first["evaluations"][-1].values
    assert 0 < last["top1"] <= last["top5"] <= 1
    assert all(other == first for other in others)
    saved = tmp_path / str(ranks) / "runs/hooks"
    assert {"best", "global_step2", "global_step8"} <= {path.name for path in saved.iterdir()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_loader_a_warmup_and_tensorboard(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    first, *others = run_on(pool, "train_with_warmup", tmp_path, ranks)
    # 13 batches per epoch, the last of 4 samples, in steps of four batches.
    assert (first["steps"], first["samples"]) == (8, 200)
    assert first["rate"] == [pytest.approx(1e-4)], "at the end of the cosine"
    assert all(other == first for other in others)
    assert list((tmp_path / str(ranks) / "runs/tensorboard").rglob("events.*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_call_takes_the_place_of_the_engine_loop(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    losses = run_on(pool, "train_with_own_loop", tmp_path, ranks)
    assert losses[0] < 1.7, "below the loss of guessing one of 8 classes, 2.08"
    assert set(losses) == {losses[0]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_batch_is_split_and_its_outputs_are_returned(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    results = run_on(pool, "train_whole_batches", tmp_path, ranks)
    assert len({loss for loss, _ in results}) == 1
    assert [outputs is None for _, outputs in results] == [True] * (ranks - 1) + [False]
    outputs = torch.tensor(results[-1][1])
    assert outputs.shape == (4, 8, 8), "micro-batches, samples, classes"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_over_a_generator_takes_the_place_of_train_from_dataset(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    first, *others = run_on(pool, "train_from_dataset", tmp_path, ranks)
    assert (first["steps"], first["samples"]) == (2, 64)
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ["train_module", "train_by_gpipe"])
def test_a_pipeline_has_the_losses_of_one_rank(pool: RankPool, tmp_path: Path, name: str) -> None:
    (alone,) = run_on(pool, name, tmp_path, 1)
    first, second = run_on(pool, name, tmp_path, 2)
    assert first == second == pytest.approx(alone, rel=1e-5)
