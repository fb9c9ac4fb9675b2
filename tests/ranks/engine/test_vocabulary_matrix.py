"""Vocabulary parallelism trains like one process on every mesh, with every schedule and setting."""

from pathlib import Path
from typing import Any

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError
from tests.ranks import training_runs
from tests.ranks.engine import cut_vocabulary_runs
from tests.ranks.engine.test_matrix import (
    CHOICES,
    Oracle,
    assert_bitwise,
    assert_like_the_oracle,
    config_of,
    oracle,
)
from tests.ranks.pool import RankPool

__all__ = ["oracle"]

# Each with the meshes (data, tensor, pipeline) of the default run.
CASES = {
    "plain": [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)],
    "untied": [(1, 1, 3)],
    "sequence parallel": [(1, 2, 2)],
    "label smoothing, z-loss": [(1, 2, 2)],
    "clipped, ZeRO": [(2, 1, 2)],
}


def run_all(pool: RankPool, mesh: tuple[int, int, int], schedules: list[str], choice: str) -> Any:
    """Return the results of rank 0; check that all ranks agree."""
    configs = []
    for schedule in schedules:
        config = config_of(mesh, schedule, choice)
        config["pipeline"]["vocabulary"] = "parallel"
        configs.append((config, CHOICES[choice][1]))
    data, tensor, pipeline = mesh
    by_rank = pool.run(data * tensor * pipeline, training_runs.train_all, configs, timeout=300.0)
    for results in zip(*by_rank, strict=True):
        for other in results[1:]:
            for key in ("loss", "norm", "eval"):
                assert other[key] == results[0][key]
    return by_rank[0]


@pytest.mark.parametrize(
    ("choice", "mesh"), [(c, mesh) for c, meshes in CASES.items() for mesh in meshes], ids=str
)
def test_a_cut_vocabulary_trains_like_one_process_and_all_schedules_give_the_same_bits(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    schedules = ["1f1b", "zb-h1"] if mesh[2] > 2 else ["1f1b", "zb-v"]
    results = run_all(pool, mesh, schedules, choice)
    assert_bitwise(results, norm="ZeRO" not in choice)
    assert_like_the_oracle(results[0], oracle(choice), choice)


def parallel(choice: str) -> dict[str, Any]:
    config = config_of((1, 1, 2), "1f1b", choice)
    config["pipeline"]["vocabulary"] = "parallel"
    return config


@pytest.mark.parametrize("choice", ["plain", "untied"])
def test_a_checkpoint_does_not_depend_on_the_cut(
    pool: RankPool, tmp_path: Path, choice: str
) -> None:
    configs = [parallel(choice), config_of((1, 1, 2), "1f1b", choice)]
    for number, (first, second) in enumerate((configs, configs[::-1])):
        folder = str(tmp_path / str(number))
        results = pool.run(2, cut_vocabulary_runs.move_checkpoint, first, second, folder)
        for equal, trained, retrained, evaluated, reevaluated in results:
            assert equal
            assert retrained == pytest.approx(trained, rel=1e-12)
            assert reevaluated == pytest.approx(evaluated, rel=1e-10)


def test_outputs_and_other_models_are_refused(pool: RankPool) -> None:
    for message in pool.run(2, cut_vocabulary_runs.refused_outputs, parallel("plain")):
        assert "pipeline.vocabulary 'parallel' computes no logits" in message
        assert "set pipeline.vocabulary to 'stage'" in message
    for message in pool.run(2, cut_vocabulary_runs.refused_model, parallel("plain")):
        assert "pipeline.vocabulary 'parallel' needs a model whose embedding and output" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"r": 2}}, "section 'lora' adapts layers of stages"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, "needs the norm of whole"),
        ({"pipeline": {"optimizer_sync": "post_validate"}}, "'post_validate' may discard"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    config = parallel("plain")
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value
    with pytest.raises(ConfigError) as refusal:
        load(config)
    assert message in str(refusal.value)
    assert "pipeline.vocabulary to 'stage'" in str(refusal.value)


@pytest.mark.sweep
def test_auto_cuts_a_large_vocabulary_and_trains_like_the_named_schedule(pool: RankPool) -> None:
    config = config_of((1, 1, 2), "auto", "untied")
    config["model"] |= {"vocab_size": 16384, "hidden_size": 32}
    stage = config | {"pipeline": {"schedule": "1f1b", "vocabulary": "stage"}}
    for chosen, losses in pool.run(2, cut_vocabulary_runs.chosen_vocabulary, config, stage):
        assert chosen == ["parallel", "auto", "stage"]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
