"""`comms_logger` counts the collectives and messages of one step, and changes no result."""

import math

import pytest

from tests.ranks.engine import comm_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import LENGTH, MICRO, MODEL, NUM_MICROBATCHES
from tests.sampling import some

# Of a message between stages, in fp32.
HIDDEN = MICRO * LENGTH * MODEL["hidden_size"] * 4
LAYERS = MODEL["num_layers"]

# Mesh -> (operation, group) -> (calls of all ranks, bytes of one; None: depends on buckets).
EXPECTED = {
    (2, 2, 1): {
        # An activation and a gradient of each micro-batch.
        ("send", "pipeline"): (2 * NUM_MICROBATCHES, HIDDEN),
        ("recv", "pipeline"): (2 * NUM_MICROBATCHES, HIDDEN),
        # ZeRO over gloo: each rank sums its slices.
        ("all_to_all", "data"): (8, None),
        ("all_gather", "data"): (8, None),
        # The gradient of the tied embedding.
        ("send_recv", "pipeline"): (4, None),
        # Norm, loss, finiteness.
        ("all_reduce", "world"): (4, None),
    },
    (1, 1, 2): {
        # Per micro-batch and rank: embedding, head, and twice forward and backward in a block.
        ("all_reduce", "tensor"): (2 * NUM_MICROBATCHES * (2 + 4 * LAYERS), HIDDEN),
        ("all_gather", "tensor"): (2 * NUM_MICROBATCHES, None),
        ("all_reduce", "world"): (2, None),
    },
}


def config_of(mesh: tuple[int, int, int], **section):
    pipeline, data, tensor = mesh
    return {
        "mesh": {"pipeline": pipeline, "data": data, "tensor": tensor},
        "zero_optimization": {"stage": 1},
        "comms_logger": section,
    }


@pytest.mark.parametrize("mesh", some(EXPECTED, 0), ids=str)
def test_the_table_of_a_step_has_all_its_communication(pool: RankPool, mesh):
    on = pool.run(math.prod(mesh), comm_runs.run, config_of(mesh, enabled=True))
    off = pool.run(math.prod(mesh), comm_runs.run, config_of(mesh))
    assert [one["losses"] for one in on] == [one["losses"] for one in off]
    assert all(one["rows"] == [] for one in off)
    for one in on:
        assert one["rows"] == on[0]["rows"]
        found = {row[:2]: row[3:] for row in one["rows"]}
        assert found.keys() == EXPECTED[mesh].keys()
        for key, (calls, nbytes) in EXPECTED[mesh].items():
            assert found[key][0] == found[key][2] == calls, key
            assert nbytes in (None, found[key][1]), key
    total = sum(calls for calls, _ in EXPECTED[mesh].values())
    (table,) = on[0]["tables"]
    assert f"communication of step 2: {total} calls on {math.prod(mesh)} ranks" in table
    assert all(one["tables"] == [] for one in on[1:])


def test_only_the_operations_of_prof_ops_are_recorded(pool: RankPool):
    section = {"enabled": True, "prof_all": False, "prof_ops": ["isend"], "profile_step": 1}
    for one in pool.run(2, comm_runs.run, config_of((2, 1, 1), **section), 1):
        assert {row[0] for row in one["rows"]} == {"send"}
        # The first step also sends headers with the shapes, of other sizes.
        assert sum(row[3] for row in one["rows"]) > 2 * NUM_MICROBATCHES
