"""The shortened quickstart: its loss curve, its log, and resuming."""

from pathlib import Path

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training import quickstart_run

GOLDEN = Path(__file__).parents[2] / "golden/quickstart_loss.txt"
# The learning rate follows the whole run, of which these are the first steps.
STEPS = [
    "training.train_steps=12",
    "scheduler.params.decay_steps=300",
    "training.generate_tokens=4",
]


def losses(result: dict) -> list[float]:
    return [line["loss"] for line in result["lines"] if line["kind"] == "train"]


def test_the_quickstart_follows_its_loss_curve(pool: RankPool, tmp_path: Path) -> None:
    result, *others = pool.run(4, quickstart_run.train, str(tmp_path), STEPS)
    curve = losses(result)
    print("\n".join(f"{loss:.4f}" for loss in curve))  # to update the golden file
    assert curve == pytest.approx([float(x) for x in GOLDEN.read_text().split()], abs=2e-3)
    assert all(other["last"] == result["last"] for other in others)
    assert [line["consumed_samples"] for line in result["lines"]] == [32 * s for s in range(1, 13)]


def test_a_gpt_is_pretrained_for_epochs(pool: RankPool, tmp_path: Path) -> None:
    epochs = [
        "training.train_steps=null",
        "training.epochs=2",
        "model.num_layers=2",
        "mesh.tensor=1",
        "train_batch_size=12",
        "train_micro_batch_size_per_gpu=2",
        "scheduler.params.warmup_steps=1",
        "training.generate_tokens=0",
    ]
    result, *_ = pool.run(2, quickstart_run.train, str(tmp_path), epochs)
    first, second = (line for line in result["lines"] if line["kind"] == "epoch")
    assert first["samples"] == second["samples"] > 12, "a partial step follows whole ones"
    assert first["samples"] % 12
    steps = [line for line in result["lines"] if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 2 * first["steps"] + 1))
    assert second["loss"] < first["loss"]
    # The schedule has the length of the run.
    assert steps[-1]["lr"] < steps[-2]["lr"]


@pytest.mark.sweep
def test_a_resumed_run_equals_the_uninterrupted_run(pool: RankPool, tmp_path: Path) -> None:
    (whole, *_) = pool.run(4, quickstart_run.train, str(tmp_path / "whole"), STEPS)
    folder = str(tmp_path / "parts")
    # The same number of samples as the whole run: a second epoch would be shuffled differently.
    pool.run(4, quickstart_run.train, folder, STEPS, 7)
    load = f'checkpoint.load="{folder}/run"'
    (resumed, *_) = pool.run(4, quickstart_run.train, folder, [*STEPS, load])
    assert losses(resumed) == losses(whole)
    assert resumed["last"] == whole["last"]
