"""The harness of benchmarks/bubble: that both systems sleep what they should; not how fast."""

import pytest
import torch
from torch.distributed.pipelining import _backward as torch_halves

from benchmarks.bubble.plans import find_plans
from benchmarks.bubble.run import marks
from benchmarks.bubble.stages import Diary, Seconds, SleepingStage
from benchmarks.bubble.systems import Task
from benchmarks.bubble.timing import lags, timeline
from benchmarks.bubble.worker import measure
from pipemega.gradients import GradientBuffer
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.split_backward import WeightGradients, split
from tests.ranks.pool import RankPool

NAP = Seconds(0.001, 0.001, 0.001)
SYSTEMS = ["pipemega:1f1b", "pipemega:zb-v", "torch:1f1b", "torch:zb-v", "torch:dualpipe-v"]


def parts(diary: Diary) -> str:
    slept = "".join(nap.part for nap in diary.naps)
    diary.clear()
    return slept


def stage() -> tuple[SleepingStage, Diary]:
    diary = Diary()
    return SleepingStage(1, NAP, 0.5, diary), diary


def test_torchs_halves_sleep_one_half_each() -> None:
    module, diary = stage()
    x = torch.ones(1, 8, requires_grad=True)
    y = module(x)
    assert parts(diary) == "F"
    _, groups = torch_halves.stage_backward_input(
        [y], [torch.ones_like(y)], [x], module.parameters()
    )
    assert parts(diary) == "I"
    torch_halves.stage_backward_weight(module.parameters(), groups)
    assert parts(diary) == "W"


def test_our_halves_sleep_one_half_each() -> None:
    module, diary = stage()
    queue = WeightGradients(GradientBuffer(list(module.named_parameters())))
    split([module], queue)
    y = module(torch.ones(1, 8, requires_grad=True))
    assert parts(diary) == "F"
    with queue.putting_off("here"):
        y.sum().backward()
    assert parts(diary) == "I"
    queue.run("here")
    assert parts(diary) == "W"


def test_a_whole_backward_sleeps_both_and_gives_the_same_gradients_either_way() -> None:
    gradients = []
    for splits in (False, True):
        module, diary = stage()
        buffer = GradientBuffer(list(module.named_parameters()))
        if splits:
            split([module], WeightGradients(buffer))
        # As on a first stage, where nobody wants the gradient of the input.
        module(torch.arange(8.0)[None]).sum().backward()
        assert sorted(parts(diary)) == ["F", "I", "W"]
        gradients.append(buffer.flats[torch.float32].clone())
    assert torch.equal(*gradients)


def test_every_system_sleeps_what_its_plan_says_and_holds_what_is_simulated(pool: RankPool) -> None:
    # `measure` holds each diary against the plan, nap by nap.
    task = Task(2, 4, NAP)
    plans, missing = find_plans(["1f1b", "zb-v"], 2, 4, NAP, {})
    assert not missing
    ranks = pool.run(2, measure, task, SYSTEMS, 2, plans)
    for name in SYSTEMS:
        own = [rank["systems"][name] for rank in ranks]
        assert [len(result["rounds"]) for result in own] == [2, 2]
        peak = max(entry["peak"] for result in own for entry in result["rounds"])
        assert peak == pytest.approx(own[0]["simulated_peak"])
        plan = Plan.from_json(own[0]["plan"])
        measured = timeline(plan, [r["parts"] for r in own], [r["naps"] for r in own])
        assert measured.makespan >= own[0]["simulated"]
        between = lags(measured)
        assert between["own"] > 0
        assert between["message"] > 0


def test_marks_compare_with_what_holds_as_much_memory() -> None:
    def row(system: str, measured: float, peak: float) -> dict[str, object]:
        return {"system": system, "measured": measured, "over_simulation": 1.02, "peak": peak}

    rows = [row("pipemega:zb-v", 1.1, 4), row("torch:zb-v", 1.2, 4), row("torch:small", 1.0, 3)]
    assert marks(rows) == {
        "worst over simulation": ["pipemega:zb-v", 1.02, True],
        "pipemega:zb-v against torch": ["torch:zb-v", pytest.approx(1.2 / 1.1), True],
    }
