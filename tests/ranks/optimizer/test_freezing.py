"""Freezing and unfreezing between steps acts as in torch with zero_grad(set_to_none=True)."""

import pytest

from tests.ranks.optimizer import freezing_runs as runs
from tests.sampling import some

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}}
PIPELINE, ZERO = {"mesh": {"pipeline": 2}}, {"zero_optimization": {"stage": 1}}
OVERLAP = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
LATE = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}


def pipeline(schedule, **settings):
    return {"pipeline": {"schedule": schedule, **settings}}


CASES = {
    1: [({}, {}), (SGD, pipeline("1f1b", activation_checkpoint_interval=1))],
    2: [
        (PIPELINE | pipeline("1f1b"), ZERO | {"mesh": {}}),
        (PIPELINE | pipeline("zb-h1"), {}),
        (PIPELINE | pipeline("zb-v", shapes="exchanged") | SGD, {}),
        (PIPELINE | pipeline("zb-h2", **LATE), {}),
        (ZERO | SGD, PIPELINE | {"zero_optimization": {}}),
        (OVERLAP, {}),
    ],
    4: [(PIPELINE | OVERLAP | pipeline("interleaved", chunks=2), {})],
}


@pytest.mark.parametrize("world", some(CASES, 0, 2))
def test_layers_that_are_frozen_for_some_steps_train_as_in_plain_torch(pool, tmp_path, world):
    """A frozen parameter was decayed and moved by its momentum; one that was unfrozen stayed."""
    for found in pool.run(world, runs.all_compared, CASES[world], str(tmp_path)):
        for case, distance in zip(CASES[world], found, strict=True):
            assert distance < 1e-10, case


def test_what_the_optimizer_cannot_follow_is_refused_before_the_step(pool):
    unfrozen, again, ranks, _ = pool.run(2, runs.refusals)[1]
    assert unfrozen == again
    assert "layers.2.weight requires a gradient on rank 0 and did not in initialize()" in unfrozen
    assert "freeze it after that" in unfrozen
    assert "layers.4.weight: requires_grad is True on rank 0 and False on rank 1" in ranks
    assert "set the same value on all ranks" in ranks


@pytest.mark.parametrize(
    "zero", [ZERO, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}]
)
def test_a_frozen_parameter_with_a_master_of_higher_precision_stays(pool, zero):
    for stayed, moved in pool.run(2, runs.held, {"bf16": {"enabled": True}, **zero}):
        assert stayed == {"layers.2.weight", "layers.2.bias"}
        assert len(moved) == 7
