"""Parameters of unusual layouts and shapes train, and resume, as in plain torch."""

import pytest

from tests.ranks.optimizer import odd_parameter_runs as runs
from tests.sampling import some

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
NADAM, ASGD, ADAGRAD = ({"type": n, "params": {"lr": 0.05}} for n in ("NAdam", "ASGD", "Adagrad"))
PIPELINE, ONE = {"mesh": {"pipeline": 2}}, {"mesh": {"pipeline": 1}}
ZERO = {"zero_optimization": {"stage": 1}}
OVERLAP = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
ZB = {"pipeline": {"schedule": "zb-v"}}

CASES = {
    1: [
        ("channels_last", {"optimizer": ADAM}, {}),
        ("channels_last", {"optimizer": ADAGRAD}, {}),
        ("gaps", {"optimizer": SGD}, {}),
    ],
    2: [
        ("channels_last", {"optimizer": ADAM, **ZERO}, PIPELINE),
        ("channels_last", {"optimizer": SGD, **PIPELINE, **ZB}, ZERO | ONE | {"pipeline": {}}),
        ("transposed", {"optimizer": ADAM, **PIPELINE}, {}),
        ("transposed", {"optimizer": ADAGRAD}, {}),
        ("gaps", {"optimizer": ADAM}, ZERO),
        ("empty", {"optimizer": ADAM, **ZERO}, PIPELINE | ZB),
        ("empty", {"optimizer": NADAM, **PIPELINE, **ZB}, {}),
        ("scalar", {"optimizer": NADAM, **ZERO}, PIPELINE),
        ("scalar", {"optimizer": ASGD, **OVERLAP}, {}),
    ],
    4: [("channels_last", {"optimizer": ADAM, **PIPELINE, **OVERLAP}, {})],
}


@pytest.mark.parametrize("world", some(CASES, 0, 2))
def test_parameters_of_any_layout_train_and_resume_as_in_plain_torch(pool, tmp_path, world):
    """Fused optimizers walk the memory of a parameter and its gradient in one order: with
    channels_last, they updated each element by the gradient of another. A parameter without
    elements, or without dims, could not be resumed."""
    for rank in pool.run(world, runs.all_compared, CASES[world], str(tmp_path)):
        for case, distances in zip(CASES[world], rank, strict=True):
            assert max(distances.values()) < 1e-10, (case, distances)
            assert len(distances) > 3


def test_a_rollback_waits_for_the_parameters_that_zero_gathers(pool):
    """The repeated step changed masters that all-gathers in flight were reading."""
    fenced = pool.run(4, runs.rolled_back, False)
    for _ in range(2):
        assert pool.run(4, runs.rolled_back, True) == fenced
    assert fenced[0][1] > 3


def test_complex_replicas_are_compared(pool):
    for error in pool.run(2, runs.complex_replicas):
        assert error.startswith(
            "ReplicaError: parameter layers.0.scale differs from rank 0: on rank 1"
        )
