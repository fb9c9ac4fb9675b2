"""From measured steps to the costs that plans are made and judged by.

Times are seconds, memory is bytes: medians over micro-batches, and over steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Kind
from pipemega.pipeline.trace import Trace

# (kind, stage) -> one number per micro-batch and trace
_Samples = Mapping[tuple[Kind, int], Sequence[float]]


def measured_costs(traces: Sequence[Trace]) -> CostModel:
    """What the steps of each stage cost, in seconds and bytes.

    forward, I, W: the median of the stage. A stage that ran only whole backwards gives `backward`,
    and I and W are half of it each; one that ran halves alone has their sum as its `backward`.

    activation: what F leaves in memory, with the message that it was given; kept: what W lets go.
    A stage that ran no W keeps all until the end. Unknown where a trace has no memory.

    message: see `message_time`.

    Args:
        traces: of training steps of one model, under the same stages; the schedules may differ.

    Raises:
        ScheduleError: there is none, or they are of different numbers of stages, or one is of an
            evaluation.
    """
    if not traces:
        raise ScheduleError("costs are measured from traces, and there is none")
    counts = {trace.plan.num_stages for trace in traces}
    if len(counts) > 1:
        raise ScheduleError(f"the traces are of different numbers of stages: {sorted(counts)}")
    if any(trace.plan.forward_only for trace in traces):
        raise ScheduleError("a trace is of an evaluation, which tells nothing of backward")
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
    """I, W and B of a stage."""
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
    """Bytes of each stage from F to the end of the backward, and from I to W."""
    if any(trace.memory is None for trace in traces):
        return None, None
    taken: dict[int, list[float]] = defaultdict(list)
    let_go: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        for step, change in _changes(trace).items():
            if step.kind is Kind.FORWARD:
                taken[step.stage].append(change)
            elif step.kind is Kind.BACKWARD_WEIGHT:
                let_go[step.stage].append(-change)
    activation = tuple(max(0.0, median(taken[stage])) for stage in stages)
    kept = tuple(
        max(0.0, median(let_go[stage])) if stage in let_go else activation[stage]
        for stage in stages
    )
    return activation, kept


def _changes(trace: Trace) -> dict[Instruction, float]:
    """What each compute step adds to the memory of its rank.

    A forward is charged with its receive and its send too: what was received is held as its input,
    and what is sent until the answer comes.
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
    """Seconds from the end of a step to when a step on another rank can use its result.

    For each way from one rank to another, the shortest time from the end of the sending step to the
    readiness of the receiving one, over boundaries and micro-batches: the shortest, since a
    receiver that was busy takes its message later than it came. Of the two ways between two ranks
    that have one clock, the shorter, for the same reason. Where their clocks were aligned, the mean
    of both: by as much as the alignment is wrong, the one is too long and the other too short. Then
    the mean over all pairs of ranks; 0 where nothing crosses.
    """
    traces = list(traces)
    one_clock = not any(trace.clock_error for trace in traces)
    ways: dict[tuple[int, int], float] = {}
    for trace in traces:
        plan = trace.plan.compute_only()
        home, timeline = plan.rank_of_stage, trace.timeline
        steps = [entry for rank in range(plan.num_ranks) for entry in timeline.steps(rank)]
        ends = {step: end for step, _, end in steps}
        for step, start, _ in steps:
            need = plan.needs(step)
            if need is None or home[need.stage] == home[step.stage]:
                continue
            way = home[need.stage], home[step.stage]
            ways[way] = min(ways.get(way, start - ends[need]), start - ends[need])
    pairs: dict[frozenset[int], list[float]] = defaultdict(list)
    for way, time in ways.items():
        pairs[frozenset(way)].append(time)
    of_pair = min if one_clock else mean
    return mean(max(0.0, of_pair(times)) for times in pairs.values()) if pairs else 0.0
