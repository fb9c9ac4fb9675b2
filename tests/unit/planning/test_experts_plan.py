"""Plans of models with experts, one of them with the sizes of DeepSeek-V3."""

import dataclasses
from pathlib import Path

import pytest

from pipemega.config import load
from pipemega.distributed.topology import Topology
from pipemega.layer_costs import tensor_meter
from pipemega.planning.estimate import Report, Request, estimate

CONFIGS = Path(__file__).parents[3] / "configs"
CONFIG, QUICKSTART = CONFIGS / "moe_671b_pp16.json", CONFIGS / "moe_quickstart.json"
# Bytes/s of an exchange between CPUs.
RATE = tensor_meter.rates_for(None, Topology()).exchange
HIDDEN, FFN, DENSE_FFN, EXPERTS, VOCABULARY = 7168, 2048, 18432, 256, 129280


def test_the_plan_of_671_b_parameters_counts_every_expert_once_and_divides_them() -> None:
    report = estimate(Request(load(CONFIG), world=2048, quick=True))
    attention = 4 * HIDDEN**2 + 2 * HIDDEN  # with the two norms of a block
    experts = EXPERTS * 3 * HIDDEN * FFN
    other = attention + 3 * HIDDEN * FFN + EXPERTS * HIDDEN  # shared expert, router
    dense = attention + 3 * HIDDEN * DENSE_FFN
    outside = 2 * VOCABULARY * HIDDEN + HIDDEN
    assert report.parameters == 3 * dense + 58 * (experts + other) + outside
    # Rank 1 has four blocks; of their experts one of the 64 ranks of the expert axis has a part.
    assert report.stages[1].layers == "4 x Block"
    assert report.prediction.memory[1].footprint.parameters == 4 * (experts // 64 + other)


def quickstart(*changes: str) -> Report:
    sizes = ["mesh.data=4", "model.num_layers=8", "model.moe_layer_freq=[0,0,0,0,1,1,1,1]"]
    return estimate(Request(load(QUICKSTART, [*sizes, *changes]), 8, quick=True))


def test_exchanges_take_time_in_the_stages_with_experts() -> None:
    first, second = quickstart("pipeline.partition=uniform").prediction.layout.costs
    assert first.exchanged == 0 < second.exchanged
    assert second.kinds["exchanges"] == pytest.approx(second.exchanged / RATE)
    for stage in (first, second):
        assert sum(stage.seconds) == pytest.approx(sum(stage.kinds.values()))


def test_slow_exchanges_move_layers_to_the_ranks_without_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = []
    for rate in (RATE, RATE / 30):
        rates = dataclasses.replace(tensor_meter.rates_for(None, Topology()), exchange=rate)
        monkeypatch.setattr(tensor_meter, "_FULL", rates)
        bounds.append(quickstart().prediction.layout.bounds)
    assert bounds[0][1] < bounds[1][1]


@pytest.mark.parametrize(("experts", "border"), [(4, 7), (64, 7)])
def test_even_parameters_are_those_that_a_token_uses(experts: int, border: int) -> None:
    """More experts need no more time, so they move no layer."""
    changes = [f"model.num_experts={experts}", "model.moe_router_topk=4"]
    report = quickstart("pipeline.partition=parameters", *changes)
    assert report.prediction.layout.bounds[1] == border


def test_w_within_exchanges_shorten_the_planned_step() -> None:
    """As many seconds as the exchanges take, on the rank with experts."""
    sizes = ("pipeline.partition=uniform", "train_micro_batch_size_per_gpu=4")
    plain, filled = (
        quickstart("train_batch_size=256", *sizes, f"pipeline.fill_waits={value}").prediction
        for value in ("false", "true")
    )
    (waits,) = (stage.waits for stage in filled.layout.costs if stage.exchanged)
    assert waits.num_forward == waits.num_backward == 8
    assert waits.forward + waits.backward == pytest.approx(
        next(stage.kinds["exchanges"] for stage in filled.layout.costs if stage.exchanged)
    )
    saved = plain.timeline.busy(1) - filled.timeline.busy(1)
    exchanged = plain.plan.num_microbatches * (waits.forward + waits.backward)
    unit = sum(filled.layout.costs[1].seconds) / (
        filled.costs.forward[1] + filled.costs.backward_input[1] + filled.costs.backward_weight[1]
    )
    # The first micro-batches have no W to run yet.
    assert 0.7 * exchanged < saved * unit < exchanged
    assert filled.timeline.makespan < plain.timeline.makespan
