"""Measured steps: their files, their timeline, and the costs estimated from them."""

import json
from dataclasses import replace
from itertools import accumulate

import pytest

from pipemega.errors import ScheduleError
from pipemega.monitor import Phase
from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import build_plan, forward_only
from pipemega.profiling.measured_costs import measured_costs, message_time
from pipemega.profiling.step_trace import Trace

COSTS = CostModel(
    (3.0, 1.0, 2.0, 5.0),
    (2.0, 1.5, 2.5, 4.0),
    (1.0, 0.5, 1.5, 2.0),
    activation=(100.0, 80.0, 60.0, 40.0),
    kept=(50.0, 90.0, 30.0, 20.0),
    message=0.25,
)


def simulated_trace(schedule, pp_size, num_microbatches, costs=COSTS, ahead=0.0, memory=True):
    """Return the trace of a run whose steps cost exactly `costs`.

    Args:
        ahead: how far the clock of the last rank is ahead.
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
    # If the input comes from another rank, the receive has already allocated 10 bytes.
    changes = {
        Kind.FORWARD: held - (10 if crosses else 0),
        Kind.BACKWARD: -held,
        Kind.BACKWARD_INPUT: kept - held,
        Kind.BACKWARD_WEIGHT: -kept,
    }
    return int(changes.get(step.kind, 0))


def with_phases(trace):
    """Return the trace with phases around the pipeline of each rank."""
    ends = [max(row) for row in trace.end]
    phases = tuple(
        (
            Phase("data", -3.0, -1.0),
            Phase("other", -1.0, began),
            Phase("pipeline", began, end + 0.5),
            Phase("gradient reduction", end + 0.5, max(ends) + 1.0),
            Phase("optimizer", max(ends) + 1.0, max(ends) + 4.0),
        )
        for began, end in zip(trace.began, ends, strict=True)
    )
    return replace(trace, phases=phases)


def test_the_parts_of_a_step_add_up_to_its_time_on_each_rank():
    trace = with_phases(simulated_trace("zb-h1", 4, 6))
    assert Trace.from_json(trace.to_json()) == trace
    for rank in range(4):
        parts = trace.parts(rank)
        assert sum(parts.values()) == pytest.approx(trace.step_time(rank), abs=1e-9)
        assert trace.step_time(rank) == trace.step_interval
        assert parts["data"] == 2.0
        assert parts["optimizer"] == 3.0
        assert parts["compute"] == pytest.approx(trace.timeline.busy(rank))
        assert parts["wait"] == pytest.approx(trace.waited(rank))
        # Before the pipeline, and after its last instruction.
        assert parts["other"] == pytest.approx(1.0 + 0.5)
        assert min(parts.values()) >= 0.0


def test_a_phase_between_two_instructions_does_not_also_count_as_waiting():
    """With post-validation, a rank awaits the gradient norm of the previous step there."""
    trace = simulated_trace("1f1b", 4, 4)
    row = max(trace.rows(1), key=lambda row: row.wait)
    middle = (row.begin + row.ready) / 2
    end = trace.end[1][-1]
    inside = (
        Phase("pipeline", 0.0, row.begin),
        Phase("gradient norm", row.begin, middle),
        Phase("pipeline", middle, end),
    )
    others = [(Phase("pipeline", 0.0, row[-1]),) for row in trace.end]
    trace = replace(trace, phases=(others[0], inside, *others[2:]))
    parts = trace.parts(1)
    assert parts["gradient norm"] == pytest.approx(middle - row.begin)
    assert parts["wait"] == pytest.approx(trace.waited(1) - parts["gradient norm"])
    assert sum(parts.values()) == pytest.approx(end)
    assert parts["other"] == pytest.approx(0.0)


def test_a_file_of_an_earlier_version_has_no_phases():
    written = json.loads(simulated_trace("1f1b", 4, 6).to_json())
    del written["phases"]
    trace = Trace.from_json(json.dumps(written))
    assert (trace.phases, trace.step_time(0), trace.step_interval) == ((), 0.0, 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_trace_is_read_back_from_its_json(schedule):
    trace = simulated_trace(schedule, 4, 6)
    assert Trace.from_json(trace.to_json()) == trace
    without = simulated_trace(schedule, 4, 6, memory=False)
    assert Trace.from_json(without.to_json()) == without


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("format"), "its key 'format' should be 'pipemega trace 1'"),
        (lambda w: w.pop("ready"), "damaged: the key 'ready' is missing"),
        (lambda w: w["end"][1].pop(), "'end' needs one number per instruction"),
        (lambda w: w["began"].pop(), "'began' has 3 numbers for 4 ranks"),
        (
            lambda w: w.update(phases=[[["nap", 0, 1]]] * 4),
            "'phases' has the unknown name 'nap'",
        ),
        (lambda w: w.update(phases=[[]]), "'phases' has 1 lists for 4 ranks"),
        (lambda w: w["memory"][0].pop(), "'memory' needs one number more"),
        (lambda w: w["end"][0].__setitem__(0, "x"), "damaged: could not convert"),
        (lambda w: w["end"][0].__setitem__(0, float("nan")), "a time is not finite"),
        (lambda w: w["plan"].pop("name"), "damaged: a plan in JSON needs the keys"),
    ],
)
def test_a_damaged_trace_is_rejected_and_the_error_names_the_fault(change, words):
    written = json.loads(simulated_trace("1f1b", 4, 6).to_json())
    change(written)
    with pytest.raises(ScheduleError, match="measured timeline") as caught:
        Trace.from_json(json.dumps(written))
    assert words in str(caught.value)
    with pytest.raises(ScheduleError, match="expected a measured timeline in JSON"):
        Trace.from_json("step 1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_the_timeline_of_a_trace_is_that_of_its_steps(schedule):
    trace = simulated_trace(schedule, 4, 6)
    simulated = simulate(trace.plan, COSTS)
    assert trace.timeline.plan == simulated.plan
    assert trace.timeline.start == simulated.start
    assert trace.timeline.end == simulated.end
    assert trace.timeline.bubble == simulated.bubble
    assert (
        simulated_trace(schedule, 4, 6, memory=False).timeline.peak
        == simulate(trace.plan, CostModel.uniform(4)).peak
    )


def test_peak_is_in_bytes_above_the_memory_at_the_start():
    trace = simulated_trace("gpipe", 4, 6)
    assert trace.timeline.peak == tuple(6 * held for held in COSTS.held_after_forward)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_waits_of_a_rank_are_its_idle_time_before_its_last_step(schedule):
    trace = simulated_trace(schedule, 2 if schedule == "zb-v" else 4, 8)
    timeline = trace.timeline
    for rank in range(trace.plan.num_ranks):
        idle = timeline.end[rank][-1] - trace.began[rank] - timeline.busy(rank)
        assert trace.waited(rank) == pytest.approx(idle)
    rank, row, need = trace.longest_waits(1)[0]
    assert row.wait == max(r.wait for q in range(trace.plan.num_ranks) for r in trace.rows(q))
    assert need == trace.plan.needs(row.step)
    assert row.step in trace.plan.programs[rank]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_measured_costs_equal_the_costs_of_the_simulated_trace(schedule):
    trace = simulated_trace(schedule, 2 if schedule == "zb-v" else 4, 8)
    found = measured_costs([trace, trace])
    for name in ("forward", "backward_input", "backward_weight", "activation", "kept"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name)), name
    assert found.whole_backward == pytest.approx(COSTS.whole_backward)
    assert found.message == pytest.approx(COSTS.message)
    # So a simulation with the measured costs gives the measured makespan.
    assert simulate(trace.plan, found).makespan == pytest.approx(trace.timeline.makespan)


def test_a_stage_with_full_backwards_gets_equal_times_for_i_and_w():
    found = measured_costs([simulated_trace("1f1b", 4, 8, memory=False)])
    assert found.backward == pytest.approx(COSTS.whole_backward)
    assert found.backward_input == found.backward_weight
    assert found.whole_backward == pytest.approx(COSTS.whole_backward)
    assert found.activation is None
    assert found.kept is None
    assert measured_costs([simulated_trace("1f1b", 4, 8)]).kept == COSTS.activation


def test_full_and_split_backwards_of_two_schedules_are_both_estimated():
    costs = CostModel(COSTS.forward, COSTS.backward_input, COSTS.backward_weight, (9, 8, 7, 6))
    found = measured_costs(
        [simulated_trace("1f1b", 4, 8, costs), simulated_trace("zb-h1", 4, 8, costs)]
    )
    assert found.backward == (9, 8, 7, 6)
    assert found.backward_weight == pytest.approx(COSTS.backward_weight)


def test_the_message_time_does_not_depend_on_the_alignment_of_clocks():
    true = message_time([simulated_trace("1f1b", 2, 8, CostModel.uniform(2, message=0.25))])
    shifted = message_time(
        [simulated_trace("1f1b", 2, 8, CostModel.uniform(2, message=0.25), ahead=0.1)]
    )
    assert true == pytest.approx(0.25)
    assert shifted == pytest.approx(true)
    assert message_time([simulated_trace("zb-v", 1, 4, CostModel.uniform(2))]) == 0.0


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([], "no trace was given"),
        (
            [simulated_trace("1f1b", 4, 4), simulated_trace("1f1b", 2, 4, CostModel.uniform(2))],
            r"stages: \[2, 4\]",
        ),
    ],
)
def test_costs_of_traces_that_do_not_match_are_rejected(traces, words):
    with pytest.raises(ScheduleError, match=words):
        measured_costs(traces)


def test_costs_of_an_evaluation_are_rejected():
    plan = lower(forward_only((0,), 1))
    trace = Trace(1, plan, (0.0,), ((0.0,),), ((1.0,),))
    with pytest.raises(ScheduleError, match="of an evaluation"):
        measured_costs([trace])
