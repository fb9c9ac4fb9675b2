"""Measured steps: their files, their timeline, and the costs that they tell."""

import json
from itertools import accumulate

import pytest

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.measured import measured_costs, message_time
from pipemega.pipeline.schedules import build_plan, forward_only
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.trace import Trace

COSTS = CostModel(
    (3.0, 1.0, 2.0, 5.0),
    (2.0, 1.5, 2.5, 4.0),
    (1.0, 0.5, 1.5, 2.0),
    activation=(100.0, 80.0, 60.0, 40.0),
    kept=(50.0, 90.0, 30.0, 20.0),
    message=0.25,
)


def played(schedule, pp_size, num_microbatches, costs=COSTS, ahead=0.0, memory=True):
    """The trace that a run would leave whose steps cost exactly `costs`.

    Args:
        ahead: by how much the clock of the last rank is.
    """
    plan = lower(build_plan(schedule, pp_size, num_microbatches))
    timeline = simulate(plan, costs)
    began, ready, end, levels = [], [], [], []
    for rank, program in enumerate(plan.programs):
        shift = ahead if rank == plan.num_ranks - 1 else 0.0
        times = {step: (start, stop) for step, start, stop in timeline.steps(rank)}
        now, changes = 0.0, []
        began.append(shift)
        ready.append([])
        end.append([])
        for step in program:
            start, now = times.get(step, (now, now))
            ready[-1].append(start + shift)
            end[-1].append(now + shift)
            changes.append(_change(step, costs, plan.crosses(step.stage - 1)))
        levels.append(tuple(accumulate(changes, initial=1000)))
    return Trace(
        3,
        plan,
        tuple(began),
        tuple(map(tuple, ready)),
        tuple(map(tuple, end)),
        tuple(levels) if memory else None,
        abs(ahead),
    )


def _change(step, costs, crosses):
    held, kept = costs.held_after_forward[step.stage], costs.held_after_input[step.stage]
    if step.kind is Kind.RECV_ACTIVATION:
        return 10
    # Of a stage whose input comes from another rank, the receive has taken its part.
    changes = {
        Kind.FORWARD: held - (10 if crosses else 0),
        Kind.BACKWARD: -held,
        Kind.BACKWARD_INPUT: kept - held,
        Kind.BACKWARD_WEIGHT: -kept,
    }
    return int(changes.get(step.kind, 0))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_trace_survives_its_file(schedule):
    trace = played(schedule, 4, 6)
    assert Trace.from_json(trace.to_json()) == trace
    without = played(schedule, 4, 6, memory=False)
    assert Trace.from_json(without.to_json()) == without


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("format"), "its key 'format' should be 'pipemega trace 1'"),
        (lambda w: w.pop("ready"), "damaged: the key 'ready' is missing"),
        (lambda w: w["end"][1].pop(), "'end' has not one number for each instruction"),
        (lambda w: w["began"].pop(), "'began' has 3 numbers for 4 ranks"),
        (lambda w: w["memory"][0].pop(), "'memory' has not one number more"),
        (lambda w: w["end"][0].__setitem__(0, "x"), "damaged: could not convert"),
        (lambda w: w["end"][0].__setitem__(0, float("nan")), "a time is not finite"),
        (lambda w: w["plan"].pop("name"), "damaged: a plan in JSON has the keys"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_what_is_wrong(change, words):
    written = json.loads(played("1f1b", 4, 6).to_json())
    change(written)
    with pytest.raises(ScheduleError, match="measured timeline") as caught:
        Trace.from_json(json.dumps(written))
    assert words in str(caught.value)
    with pytest.raises(ScheduleError, match="in JSON was expected"):
        Trace.from_json("step 1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_the_timeline_of_a_trace_is_that_of_its_steps(schedule):
    trace = played(schedule, 4, 6)
    simulated = simulate(trace.plan, COSTS)
    assert trace.timeline.plan == simulated.plan
    assert trace.timeline.start == simulated.start
    assert trace.timeline.end == simulated.end
    assert trace.timeline.bubble == simulated.bubble
    assert (
        played(schedule, 4, 6, memory=False).timeline.peak
        == simulate(trace.plan, CostModel.uniform(4)).peak
    )


def test_peak_is_in_bytes_above_what_was_there_at_the_start():
    trace = played("gpipe", 4, 6)
    assert trace.timeline.peak == tuple(6 * held for held in COSTS.held_after_forward)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_waits_are_what_a_rank_does_not_work_before_its_last_step(schedule):
    trace = played(schedule, 2 if schedule == "zb-v" else 4, 8)
    timeline = trace.timeline
    for rank in range(trace.plan.num_ranks):
        idle = timeline.end[rank][-1] - trace.began[rank] - timeline.busy(rank)
        assert trace.waited(rank) == pytest.approx(idle)
    rank, row, need = trace.longest_waits(1)[0]
    assert row.wait == max(r.wait for q in range(trace.plan.num_ranks) for r in trace.rows(q))
    assert need == trace.plan.needs(row.step)
    assert row.step in trace.plan.programs[rank]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_measured_costs_are_the_costs_that_were_played(schedule):
    trace = played(schedule, 2 if schedule == "zb-v" else 4, 8)
    found = measured_costs([trace, trace])
    for name in ("forward", "backward_input", "backward_weight", "activation", "kept"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name)), name
    assert found.whole_backward == pytest.approx(COSTS.whole_backward)
    assert found.message == pytest.approx(COSTS.message)
    # And so the simulation of what was measured is what was measured.
    assert simulate(trace.plan, found).makespan == pytest.approx(trace.timeline.makespan)


def test_a_stage_that_runs_whole_backwards_has_halves_of_equal_time():
    found = measured_costs([played("1f1b", 4, 8, memory=False)])
    assert found.backward == pytest.approx(COSTS.whole_backward)
    assert found.backward_input == found.backward_weight
    assert found.whole_backward == pytest.approx(COSTS.whole_backward)
    assert found.activation is None
    assert found.kept is None
    assert measured_costs([played("1f1b", 4, 8)]).kept == COSTS.activation


def test_whole_and_split_backwards_of_two_schedules_are_both_told():
    costs = CostModel(COSTS.forward, COSTS.backward_input, COSTS.backward_weight, (9, 8, 7, 6))
    found = measured_costs([played("1f1b", 4, 8, costs), played("zb-h1", 4, 8, costs)])
    assert found.backward == (9, 8, 7, 6)
    assert found.backward_weight == pytest.approx(COSTS.backward_weight)


def test_the_message_time_does_not_depend_on_the_alignment_of_clocks():
    true = message_time([played("1f1b", 2, 8, CostModel.uniform(2, message=0.25))])
    shifted = message_time([played("1f1b", 2, 8, CostModel.uniform(2, message=0.25), ahead=0.1)])
    assert true == pytest.approx(0.25)
    assert shifted == pytest.approx(true)
    assert message_time([played("zb-v", 1, 4, CostModel.uniform(2))]) == 0.0


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([], "there is none"),
        ([played("1f1b", 4, 4), played("1f1b", 2, 4, CostModel.uniform(2))], r"stages: \[2, 4\]"),
    ],
)
def test_costs_of_traces_that_do_not_fit_are_refused(traces, words):
    with pytest.raises(ScheduleError, match=words):
        measured_costs(traces)


def test_costs_of_an_evaluation_are_refused():
    plan = lower(forward_only((0,), 1))
    trace = Trace(1, plan, (0.0,), ((0.0,),), ((1.0,),))
    with pytest.raises(ScheduleError, match="of an evaluation"):
        measured_costs([trace])
