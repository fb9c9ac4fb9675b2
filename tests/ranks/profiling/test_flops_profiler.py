"""The table of `flops_profiler` covers all stages, and the FLOPs of all tensor ranks."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from pipemega.engine.engine import Engine
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import LENGTH, MICRO, VOCAB, build, data, settings


def trained(
    mesh: dict[str, Any],
    pipeline: dict[str, Any],
    model: dict[str, Any],
    profiler: dict[str, Any],
) -> Engine:
    """Return the engine after two steps, with a profile of the second."""
    config = settings(
        mesh=mesh,
        # The ranks of the layers are those of this cut.
        pipeline={"partition": "parameters", **pipeline},
        model={"num_layers": 2, "make_vocab_size_divisible_by": 1, **model},
        flops_profiler={"enabled": True, "profile_step": 2, **profiler},
        train_batch_size=4 * MICRO * mesh.get("data", 1),
    )
    engine = build(config)
    for step in range(2):
        engine.train_batch(data(engine, step))
    return engine


def profiled(
    mesh: dict[str, Any], pipeline: dict[str, Any], model: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return what this rank prints, and the costs of the modules by name."""
    with redirect_stdout(io.StringIO()) as out:
        engine = trained(mesh, pipeline, model, {})
    assert engine.steps.profiler is not None
    profile = engine.steps.profiler.profile
    found = {}
    if profile is not None:
        found = {
            cost.name: (rank, cost.kind, cost.level, cost.parameters, profile.tensor * cost.flops)
            for rank, cost in profile.modules
        }
        assert all(set(rank.seconds) >= {"forward", "backward"} for rank in profile.ranks)
        # A layer of which several ranks have a shard counts once.
        layers = [cost for _, cost in profile.modules if cost.level == 1]
        assert profile.forward_flops == profile.tensor * sum(cost.flops for cost in layers)
        of_ranks = (c.seconds for r in profile.ranks for c in r.modules if c.level == 1)
        assert profile.forward_seconds == pytest.approx(sum(of_ranks))
        assert all(rank.only_timed for rank in profile.ranks)
    return out.getvalue(), found


@pytest.mark.parametrize(
    ("mesh", "schedule", "stages"),
    [
        ({"pipeline": 2, "tensor": 2}, "zb-v", [0, 0, 1, 1, 0, 0]),
        pytest.param(
            {"pipeline": 2, "data": 2}, "1f1b", [0, 0, 0, 1, 1, 1], marks=pytest.mark.sweep
        ),
    ],
)
def test_rank_0_prints_one_table_of_all_stages(
    pool: RankPool, mesh: dict[str, Any], schedule: str, stages: list[int]
) -> None:
    ((_, expected),) = pool.run(1, profiled, {}, {}, {})
    (text, found), *others = pool.run(4, profiled, mesh, {"schedule": schedule}, {})
    assert others == [("", {})] * 3
    assert text.count("flops profile of step 2\n") == 1
    # Equal but for the rank.
    assert [(n, cost[1:]) for n, cost in found.items()] == [
        (n, cost[1:]) for n, cost in expected.items()
    ]
    assert [cost[0] for cost in found.values() if cost[2] == 1] == stages


def parallel(schedule: str) -> dict[str, Any]:
    return {"schedule": schedule, "vocabulary": "parallel"}


@pytest.mark.parametrize(
    ("mesh", "schedule", "untied"),
    [
        ({"pipeline": 2}, "1f1b", False),
        pytest.param({"pipeline": 2, "tensor": 2}, "zb-v", True, marks=pytest.mark.sweep),
    ],
)
def test_the_shards_of_the_vocabulary_have_the_sums_of_the_whole_embedding_and_head(
    pool: RankPool, mesh: dict[str, Any], schedule: str, untied: bool
) -> None:
    model = {"untie_embeddings_and_output_weights": untied}
    ((whole, expected),) = pool.run(1, profiled, {}, {}, model)
    ranks = mesh["pipeline"] * mesh.get("tensor", 1)
    (text, found), *others = pool.run(ranks, profiled, mesh, parallel(schedule), model)
    assert others == [("", {})] * (ranks - 1)
    # Equal but for the rank.
    assert [(n, cost[1:]) for n, cost in found.items()] == [
        (n, cost[1:]) for n, cost in expected.items()
    ]
    assert [n for n, cost in found.items() if cost[0] is None] == ["layers.0", "layers.5"]
    assert re.search(r"\n  layers.0 +TokenEmbedding +all .* 0 +0.0% ", text)
    assert re.search(r"\n  layers.5 +VocabParallelHead +all .* .FLOP/s\n", text)
    totals = [
        re.findall(r"\n(?:parameters .*|(?:for|back)ward .*FLOP\b)", t) for t in (whole, text)
    ]
    assert totals[0] == totals[1]


def test_the_padding_of_the_vocabulary_has_no_flops_in_the_shards(pool: RankPool) -> None:
    model = {"make_vocab_size_divisible_by": 16}
    (_, stage), _ = pool.run(2, profiled, {"pipeline": 2}, {"schedule": "1f1b"}, model)
    (_, shards), _ = pool.run(2, profiled, {"pipeline": 2}, parallel("1f1b"), model)
    per_row = 2 * MICRO * LENGTH * 16
    assert stage["layers.5"][-1] == 64 * per_row
    assert shards["layers.5"][-1] == VOCAB * per_row


def changed_by_the_profile(pipeline: dict[str, Any]) -> list[str]:
    """Return the parameters whose values differ from those of a run without a profile."""
    mesh = {"pipeline": 2}
    plain, engine = (trained(mesh, pipeline, {}, {"enabled": e}) for e in (False, True))
    shard = engine.steps.model.vocabulary
    assert shard is not None
    assert shard.observer is None
    states = plain.parameter_state(), engine.parameter_state()
    return [name for name, value in states[0].items() if not torch.equal(states[1][name], value)]


def test_a_profile_of_shards_leaves_the_bits_of_the_parameters(pool: RankPool) -> None:
    assert pool.run(2, changed_by_the_profile, parallel("zb-h1")) == [[], []]
