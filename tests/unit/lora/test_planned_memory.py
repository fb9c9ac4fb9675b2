"""`pipemega plan` counts no gradients, masters or optimizer state of frozen parameters."""

from pipemega.config import load
from pipemega.planning.estimate import Request, estimate
from tests.ranks.training_runs import settings


def test_the_plan_counts_frozen_parameters_as_weights_alone() -> None:
    changes = {"bf16": {"enabled": True}, "scheduler": None, "mesh": {"pipeline": 2}}
    full = estimate(Request(load(settings(**changes)), world=2))
    lora = estimate(Request(load(settings(**changes, lora={"r": 2})), world=2))
    added = lora.parameters - full.parameters
    # Four linears in each of three blocks: r * (in + out) each.
    assert added == 3 * 2 * ((16 + 48) + (16 + 16) + (16 + 24) + (24 + 16))
    trained = 0
    for plain, adapted in zip(full.prediction.memory, lora.prediction.memory, strict=True):
        elements = adapted.footprint.parameters - plain.footprint.parameters
        assert adapted.footprint.weights == plain.footprint.weights + 2 * elements
        # fp32 masters, and the two moments of Adam.
        assert adapted.footprint.masters == 4 * elements
        assert 8 * elements <= adapted.footprint.optimizer < 8.5 * elements + 200
        assert 4 * elements <= adapted.footprint.gradients < plain.footprint.gradients
        trained += elements
    assert trained == added
