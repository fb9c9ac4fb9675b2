"""Vocabulary parallelism trains like one process on every mesh, with every schedule and setting."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError
from tests.ranks import training_runs
from tests.ranks.engine import cut_vocabulary_runs
from tests.ranks.engine.test_matrix import (
    CHOICES,
    SCHEDULES,
    SPLIT,
    TWO_STAGES_PER_RANK,
    Oracle,
    assert_bitwise,
    assert_like_the_oracle,
    config_of,
    largest_difference,
    oracle,
)
from tests.ranks.pool import RankPool
from tests.sampling import some_cases

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
    ("choice", "mesh"),
    some_cases([(c, mesh) for c, meshes in CASES.items() for mesh in meshes], 1, 2, 6, 7),
    ids=str,
)
def test_a_cut_vocabulary_trains_like_one_process_and_all_schedules_give_the_same_bits(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    schedules = ["1f1b", "zb-h1"] if mesh[2] > 2 else ["1f1b", "zb-v"]
    results = run_all(pool, mesh, schedules, choice)
    assert_bitwise(results, norm="ZeRO" not in choice)
    assert_like_the_oracle(results[0], oracle(choice), choice)


CANNOT_BE_CUT = ("LoRA", "LAMB", "post-validation", "by inductor", "cut by type")


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "choice", [c for c in CHOICES if not any(word in c for word in CANNOT_BE_CUT)]
)
def test_every_setting_with_a_cut_vocabulary_trains_like_one_process(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    for result in run_all(pool, mesh, ["1f1b", "zb-h1"], choice):
        assert_like_the_oracle(result, oracle(choice), choice)


def test_graphs_keep_the_output_of_the_last_stage_until_the_head_has_its_gradient(
    pool: RankPool, oracle: Oracle
) -> None:
    """The next micro-batch overwrote it: the gradient of the head was wrong (in the sweep)."""
    (result,) = run_all(pool, (1, 1, 2), ["1f1b"], "CUDA graphs")
    assert_like_the_oracle(result, oracle("CUDA graphs"), "CUDA graphs")


@pytest.mark.sweep
def test_all_schedules_with_a_cut_vocabulary_give_the_same_bits(
    pool: RankPool, oracle: Oracle
) -> None:
    schedules = [*SCHEDULES, *SPLIT, *TWO_STAGES_PER_RANK]
    results = run_all(pool, (1, 1, 2), schedules, "plain")
    assert_bitwise(results)
    assert_like_the_oracle(results[0], oracle("plain"), "plain")


@pytest.mark.sweep
@pytest.mark.parametrize("vocabulary", ["stage", "parallel"])
@pytest.mark.parametrize("ignored", ["micro-batches", "step", "data rank"])
def test_labels_that_do_not_count_are_those_of_one_process(
    pool: RankPool, ignored: str, vocabulary: str
) -> None:
    alone = config_of((1, 1, 1), "sequential", "clipped")
    (want,) = pool.run(1, cut_vocabulary_runs.train_ignoring, alone, ignored)
    config = config_of((2, 1, 2), "zb-h1", "clipped")
    config["pipeline"]["vocabulary"] = vocabulary
    for got in pool.run(4, cut_vocabulary_runs.train_ignoring, config, ignored):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-10, nan_ok=True)
        assert got["skipped"] == want["skipped"]
        assert largest_difference(got["parameters"], want["parameters"]) < 1e-10


def parallel(choice: str, mesh: tuple[int, int, int] = (1, 1, 2)) -> dict[str, Any]:
    config = config_of(mesh, "1f1b", choice)
    config["pipeline"]["vocabulary"] = "parallel"
    return config


@pytest.mark.parametrize(
    ("choice", "mesh"),
    [
        ("plain", (1, 1, 2)),
        ("untied", (1, 1, 2)),
        pytest.param("sequence parallel", (1, 2, 2), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_checkpoints_and_outputs_do_not_depend_on_the_cut(
    pool: RankPool, tmp_path: Path, choice: str, mesh: tuple[int, int, int]
) -> None:
    configs = [parallel(choice, mesh), config_of(mesh, "1f1b", choice)]
    for number, (first, second) in enumerate((configs, configs[::-1])):
        folder = str(tmp_path / str(number))
        world = mesh[1] * mesh[2]
        results = pool.run(world, cut_vocabulary_runs.move_checkpoint, first, second, folder)
        assert any(differences for _, differences, *_ in results)
        for equal, differences, trained, retrained, evaluated, reevaluated in results:
            assert equal
            assert all(difference < 1e-12 for difference in differences)
            assert retrained == pytest.approx(trained, rel=1e-12)
            assert reevaluated == pytest.approx(evaluated, rel=1e-10)


def test_the_origin_of_nan_is_the_layer_and_the_rank_of_the_rows(pool: RankPool) -> None:
    for embedding, head in pool.run(2, cut_vocabulary_runs.origins_of_nan, parallel("untied")):
        assert re.search(
            r"in the forward of micro-batch \d+, pipeline rank 1, layer 0 'layers.0' "
            r"\(TokenEmbedding\): output has \d+ nan .* its parameter 'weight' has 1 nan",
            embedding,
        )
        assert (
            "in the forward of micro-batch 0, pipeline rank 1, layer 5 'layers.5' "
            "(VocabParallelHead): output has" in head
        )


@pytest.mark.parametrize(("vocabulary", "mesh"), [("parallel", (1, 1, 2)), ("stage", (1, 2, 2))])
def test_an_overflow_in_a_head_without_logits_skips_the_step(
    pool: RankPool, vocabulary: str, mesh: tuple[int, int, int]
) -> None:
    """The head multiplies by the loss scale in F or C, before the backward of the stages."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    config = config_of(mesh, "zb-h1", "plain") | {"fp16": fp16}
    config["pipeline"]["vocabulary"] = vocabulary
    alone = config_of((1, 1, 1), "sequential", "plain") | {"fp16": fp16}
    (want,) = pool.run(1, training_runs.train, alone, "float32")
    assert want["skipped"] == [True] * training_runs.STEPS
    for got in pool.run(mesh[1] * mesh[2], training_runs.train, config, "float32"):
        assert got["skipped"] == want["skipped"]
        assert got["scale"] == want["scale"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-2)
        assert largest_difference(got["parameters"], want["parameters"]) == 0


def test_other_models_and_labels_of_some_tokens_are_refused(pool: RankPool) -> None:
    for message in pool.run(2, cut_vocabulary_runs.error_of_short_labels, parallel("plain")):
        assert "the labels [2, 7] are 14, and the inputs have 16 tokens" in message
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
