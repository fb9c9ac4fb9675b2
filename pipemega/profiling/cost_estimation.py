"""Computes the costs of the stages (a `CostModel`) from measured steps.

Times are in seconds, memory is in bytes: medians over micro-batches and steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.profiling.step_trace import Trace

# (kind, stage) -> one number per micro-batch and trace
_Samples = Mapping[tuple[Kind, int], Sequence[float]]


def measured_costs(traces: Sequence[Trace]) -> CostModel:
    """Return the costs of each stage, in seconds and bytes.

    forward, I, W: the median of the stage. If a stage ran only full backwards, `backward` is their
    median, and I and W are half of it each. If it ran only I and W, `backward` is their sum.

    activation: memory that F allocates and keeps, including the received input. kept: memory that W
    frees; equal to activation for a stage that ran no W. Both are None if a trace has no memory.

    message: see `message_time`.

    Args:
        traces: training steps of one model, split into the same stages; the schedules may differ.

    Raises:
        ScheduleError: `traces` is empty, the numbers of stages differ, or a trace is of an
            evaluation.
    """
    if not traces:
        raise ScheduleError("cannot estimate costs: no trace was given")
    counts = {trace.plan.num_stages for trace in traces}
    if len(counts) > 1:
        raise ScheduleError(f"the traces have different numbers of stages: {sorted(counts)}")
    if any(trace.plan.forward_only for trace in traces):
        raise ScheduleError("a trace is of an evaluation, which has no backward to measure")
    stages, times = range(counts.pop()), _times(traces)
    forward = [median(times[Kind.FORWARD, stage]) for stage in stages]
    inputs, weights, whole = zip(*(_backward(times, stage) for stage in stages), strict=True)
    activation, kept = _memory(traces, stages)
    return CostModel(
        tuple(forward),
        tuple(inputs),
        tuple(weights),
        backward=tuple(whole),
        activation=activation,
        kept=kept,
        message=message_time(traces),
    )


def _times(traces: Iterable[Trace]) -> _Samples:
    times = defaultdict(list)
    for trace in traces:
        for rank in range(trace.plan.num_ranks):
            for row in trace.rows(rank):
                times[row.step.kind, row.step.stage].append(row.end - row.ready)
    return times


def _backward(times: _Samples, stage: int) -> tuple[float, float, float]:
    """Return the seconds of I, W and B of a stage."""
    whole, first, second = (
        median(times[kind, stage]) if (kind, stage) in times else None
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if first is None or second is None:
        assert whole is not None, f"stage {stage} has no backward"
        return whole / 2, whole / 2, whole
    return first, second, first + second if whole is None else whole


def _memory(
    traces: Sequence[Trace], stages: Iterable[int]
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the bytes of each stage from F to the end of the backward, and from I to W."""
    if any(trace.memory is None for trace in traces):
        return None, None
    allocated: dict[int, list[float]] = defaultdict(list)
    freed: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        for step, change in _changes(trace).items():
            if step.kind is Kind.FORWARD:
                allocated[step.stage].append(change)
            elif step.kind is Kind.BACKWARD_WEIGHT:
                freed[step.stage].append(-change)
    activation = tuple(max(0.0, median(allocated[stage])) for stage in stages)
    kept = tuple(
        max(0.0, median(freed[stage])) if stage in freed else activation[stage] for stage in stages
    )
    return activation, kept


def _changes(trace: Trace) -> dict[Instruction, float]:
    """Return the bytes that each compute step adds to the memory of its rank.

    The receive and the send of a forward count for the forward: the received tensor is kept as its
    input, and the sent tensor is kept until the gradient arrives.
    """
    assert trace.memory is not None
    changes: dict[Instruction, float] = defaultdict(float)
    for program, levels in zip(trace.plan.programs, trace.memory, strict=True):
        for step, before, after in zip(program, levels, levels[1:], strict=False):
            if step.kind in (Kind.RECV_ACTIVATION, Kind.SEND_ACTIVATION):
                step = step._replace(kind=Kind.FORWARD)
            changes[step] += after - before
    return changes


def message_time(traces: Iterable[Trace]) -> float:
    """Return the seconds from the end of a step until a step on another rank can use its result.

    For each direction between two ranks: the shortest time from the end of the sending step to the
    `ready` time of the receiving step, over stage boundaries and micro-batches. The shortest,
    because a busy receiver takes a message later than it arrived. For each pair of ranks: the
    shorter of the two directions if the ranks share one clock, else their mean, because an
    alignment error makes one direction too long and the other too short by the same amount. The
    result is the mean over all pairs; 0 if no message crosses ranks.
    """
    traces = list(traces)
    one_clock = not any(trace.clock_error for trace in traces)
    directions: dict[tuple[int, int], float] = {}
    for trace in traces:
        plan = trace.plan.compute_only()
        timeline = trace.timeline
        steps = [entry for rank in range(plan.num_ranks) for entry in timeline.steps(rank)]
        ends = {step: end for step, _, end in steps}
        for step, start, _ in steps:
            need = plan.remote_need(step)
            if need is None:
                continue
            key = plan.rank_of(need), plan.rank_of(step)
            time = start - ends[need]
            directions[key] = min(directions.get(key, time), time)
    pairs: dict[frozenset[int], list[float]] = defaultdict(list)
    for key, time in directions.items():
        pairs[frozenset(key)].append(time)
    combine = min if one_clock else mean
    return mean(max(0.0, combine(times)) for times in pairs.values()) if pairs else 0.0
