"""The code of benchmarks/bubble: sleep times, memory and comparisons of each system, not speed."""

import pytest
import torch
from torch.distributed.pipelining import _backward as torch_halves

from benchmarks.bubble.plans import find_plans
from benchmarks.bubble.run import comparisons
from benchmarks.bubble.stages import Seconds, SleepingStage, SleepLog
from benchmarks.bubble.systems import Task
from benchmarks.bubble.timing import lags, timeline
from benchmarks.bubble.worker import measure
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from tests.ranks.pool import RankPool

SECONDS = Seconds(0.001, 0.001, 0.001)
SYSTEMS = ["pipemega:1f1b", "pipemega:zb-v", "torch:1f1b", "torch:zb-v", "torch:dualpipe-v"]


def parts(log: SleepLog) -> str:
    slept = "".join(sleep.part for sleep in log.sleeps)
    log.clear()
    return slept


def stage() -> tuple[SleepingStage, SleepLog]:
    log = SleepLog()
    return SleepingStage(1, SECONDS, 0.5, log), log


def test_the_two_halves_of_torchs_backward_sleep_for_i_and_for_w() -> None:
    module, log = stage()
    x = torch.ones(1, 8, requires_grad=True)
    y = module(x)
    assert parts(log) == "F"
    _, groups = torch_halves.stage_backward_input(
        [y], [torch.ones_like(y)], [x], module.parameters()
    )
    assert parts(log) == "I"
    torch_halves.stage_backward_weight(module.parameters(), groups)
    assert parts(log) == "W"


def test_the_two_halves_of_pipemegas_backward_sleep_for_i_and_for_w() -> None:
    module, log = stage()
    queue = WeightGradQueue(GradientBuffer(list(module.named_parameters())))
    enable_split_backward([module], queue)
    y = module(torch.ones(1, 8, requires_grad=True))
    assert parts(log) == "F"
    with queue.defer("here"):
        y.sum().backward()
    assert parts(log) == "I"
    queue.run("here")
    assert parts(log) == "W"


def test_a_full_backward_sleeps_for_i_and_w_with_and_without_the_queue() -> None:
    gradients = []
    for splits in (False, True):
        module, log = stage()
        buffer = GradientBuffer(list(module.named_parameters()))
        if splits:
            enable_split_backward([module], WeightGradQueue(buffer))
        # As on the first stage, whose input needs no gradient.
        module(torch.arange(8.0)[None]).sum().backward()
        assert sorted(parts(log)) == ["F", "I", "W"]
        gradients.append(buffer.flats[torch.float32].clone())
    assert torch.equal(*gradients)


@pytest.mark.sweep
def test_every_system_sleeps_as_planned_and_holds_the_simulated_memory(pool: RankPool) -> None:
    # `measure` checks each log against the plan, sleep by sleep.
    task = Task(2, 4, SECONDS)
    plans, missing = find_plans(["1f1b", "zb-v"], 2, 4, SECONDS, {})
    assert not missing
    ranks = pool.run(2, measure, task, SYSTEMS, 2, plans)
    for name in SYSTEMS:
        own = [rank["systems"][name] for rank in ranks]
        assert [len(result["rounds"]) for result in own] == [2, 2]
        peak = max(entry["peak"] for result in own for entry in result["rounds"])
        assert peak == pytest.approx(own[0]["simulated_peak"])
        plan = Plan.from_json(own[0]["plan"])
        measured = timeline(plan, [r["parts"] for r in own], [r["sleeps"] for r in own])
        assert measured.makespan >= own[0]["simulated"]
        lag = lags(measured)
        assert lag["own"] > 0
        assert lag["message"] > 0


def test_comparisons_are_with_systems_that_hold_at_least_the_same_memory() -> None:
    def row(system: str, measured: float, peak: float) -> dict[str, object]:
        return {"system": system, "measured": measured, "over_simulation": 1.02, "peak": peak}

    rows = [row("pipemega:zb-v", 1.1, 4), row("torch:zb-v", 1.2, 4), row("torch:small", 1.0, 3)]
    assert comparisons(rows) == {
        "worst over simulation": ["pipemega:zb-v", 1.02, True],
        "pipemega:zb-v against torch": ["torch:zb-v", pytest.approx(1.2 / 1.1), True],
    }
