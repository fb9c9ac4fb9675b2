"""Computes the costs of the stages (a `CostModel`) from measured steps.

Times are in seconds, memory is in bytes: medians over micro-batches and steps.

Compares a measured step with a simulation of the same plan that uses the measured costs.

If the two differ, the cause is neither the plan nor the usual speed of its steps: a step took
longer than its median, messages arrived late, or a rank was busy with other work.

Writes the timeline of a traced step: files to look at, and a record for the monitor.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from pipemega.errors import ConfigError, ScheduleError
from pipemega.lazy_imports import deferred
from pipemega.monitor import TimelineRecord
from pipemega.monitor.timers import OTHER, PIPELINE, Phase
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel, Timeline, simulate
from pipemega.printing import aligned, percent
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


if TYPE_CHECKING:
    from pipemega.pipeline import visualize
    from pipemega.pipeline.visualize import text as text_form
else:
    visualize = deferred("pipemega.pipeline.visualize")
    text_form = deferred("pipemega.pipeline.visualize.text")

_MS, _MIB = 1e3, 2.0**-20


@dataclass(frozen=True)
class Comparison:
    """The measured and the simulated timeline, in milliseconds; memory in MiB if it was measured.

    Args:
        trace: the measured step.
        costs: estimated from `trace`.
        predicted: the simulated timeline.
    """

    trace: Trace
    costs: CostModel
    predicted: Timeline

    @property
    def measured(self) -> Timeline:
        """The measured timeline."""
        return self.trace.timeline

    @property
    def memory_unit(self) -> str:
        return "micro-batches" if self.trace.memory is None else "MiB"

    def render(self, form: str) -> bytes:
        """Return a file that shows both timelines, the measured one first.

        Args:
            form: png, svg, html or trace.

        Raises:
            ConfigError: PNG or SVG, and matplotlib is not installed.
        """
        name = f"{self.measured.plan.name}, step {self.trace.step}"
        panels = (
            visualize.Panel(self.measured, f"measured: {name}", self.costs, phases=self.phases()),
            visualize.Panel(
                self.predicted,
                "simulated with the measured costs",
                self.costs,
                phases=self.predicted_phases(),
            ),
        )
        tables = (
            [visualize.Table("parts of the step, ms", *self.parts())] if self.trace.phases else []
        )
        intro = visualize.Intro(name, tables=tables)
        return visualize.render(form, panels, unit="ms", memory_unit=self.memory_unit, intro=intro)

    def text(self, width: int = 120) -> str:
        """Return both timelines and tables of totals, ranks, stages and waits, as text."""
        plan, step = self.measured.plan, self.trace
        parts = [
            f"step {step.step}: {plan.name}, {plan.num_ranks} ranks, {plan.num_stages} stages, "
            f"{plan.num_microbatches} micro-batches",
            f"measured\n{text_form.draw_text(self.measured, width, phases=self.phases())}",
            "simulated with the measured costs\n"
            f"{text_form.draw_text(self.predicted, width, phases=self.predicted_phases())}",
            _table(("", "measured", "simulated"), self._totals()),
            _table(*self._by_rank()),
            *([f"parts of the step, ms\n{_table(*self.parts())}"] if step.phases else []),
            _table(*self._by_stage()),
            f"message between ranks: {self.costs.message:.4g} ms; clocks of the ranks agree within "
            f"{step.clock_error:.3g} ms",
            *self._waits(),
        ]
        return "\n\n".join(parts)

    def _totals(self) -> list[tuple[str, ...]]:
        totals: list[tuple[str, Callable[[Timeline], str]]] = [
            ("makespan, ms", lambda t: f"{t.makespan:.4g}"),
            ("span, ms", lambda t: f"{t.span:.4g}"),
            ("step, ms", lambda t: f"{self._step_time(t):.4g}"),
            ("bubble", lambda t: percent(t.bubble, 2)),
            (f"peak memory, {self.memory_unit}", lambda t: f"{max(t.peak):.4g}"),
        ]
        if not self.trace.phases:
            totals = [entry for entry in totals if entry[0] != "step, ms"]
        return [(name, show(self.measured), show(self.predicted)) for name, show in totals]

    def _step_time(self, timeline: Timeline) -> float:
        """Return the time of the whole step if its pipeline takes the makespan of `timeline`."""
        outside = self.trace.step_interval - self.measured.makespan
        return timeline.makespan + outside

    def phases(self) -> list[list[Phase]]:
        """Return, for each rank, the measured phases outside of the pipeline."""
        return [[phase for phase in rank if phase.name != PIPELINE] for rank in self.trace.phases]

    def predicted_phases(self) -> list[list[Phase]]:
        """Return the phases as they are around the simulated pipeline: as long as measured.

        Those after the pipeline end earlier or later by the difference of the makespans.
        """
        zero = min(row[0] for row in self.measured.start)
        later = self.predicted.makespan - self.measured.makespan
        found = []
        for rank, phases in enumerate(self.phases()):
            first, last = self.measured.start[rank][0], self.measured.end[rank][-1]
            done, moved = self.predicted.end[rank][-1], []
            for name, start, end in phases:
                if end <= first:
                    moved.append(Phase(name, start - zero, end - zero))
                elif start >= last:
                    begin = max(done, start - zero + later)
                    moved.append(Phase(name, begin, max(begin, end - zero + later)))
            found.append(moved)
        return found

    def parts(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return a table of the parts of the step on each rank, which add up to its time."""
        ranks = range(self.trace.plan.num_ranks)
        times = [self.trace.parts(rank) for rank in ranks]
        names = [name for name in times[0] if name == OTHER or any(part[name] for part in times)]
        rows = [
            (
                str(rank),
                *(f"{parts[name]:.4g}" for name in names),
                f"{self.trace.step_time(rank):.4g}",
            )
            for rank, parts in zip(ranks, times, strict=True)
        ]
        return ("rank", *names, "step"), rows

    def _by_rank(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        unit = self.memory_unit
        header: tuple[str, ...] = ("rank", "busy, ms", "waited, ms", "bubble", f"peak, {unit}")
        rows: list[tuple[str, ...]] = [
            (
                str(rank),
                f"{self.measured.busy(rank):.4g}",
                f"{self.trace.waited(rank):.4g}",
                percent(self.measured.bubble_of(rank), 2),
                f"{self.measured.peak[rank]:.4g}",
            )
            for rank in range(self.measured.plan.num_ranks)
        ]
        return header, rows

    def _by_stage(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        costs, unit = self.costs, self.memory_unit
        columns = {
            "F, ms": costs.forward,
            "I, ms": costs.backward_input,
            "W, ms": costs.backward_weight,
            "B, ms": costs.whole_backward,
            f"after F, {unit}": costs.held_after_forward,
            f"after I, {unit}": costs.held_after_input,
        }
        rows = enumerate(zip(*columns.values(), strict=True))
        table = [(str(stage), *(f"{n:.4g}" for n in row)) for stage, row in rows]
        return ("stage", *columns), table

    def _waits(self) -> list[str]:
        waits = [
            f"  rank {rank}  {row.wait:8.4g} ms at {row.step} for {need}"
            for rank, row, need in self.trace.longest_waits()
        ]
        return ["\n".join(("longest waits", *waits))] if waits else []


def compare(trace: Trace) -> Comparison:
    """Simulate the plan of `trace` with the costs measured in it."""
    scaled = _in_ms_and_mib(trace)
    costs = measured_costs([scaled])
    return Comparison(scaled, costs, simulate(scaled.timeline.plan, costs))


def _in_ms_and_mib(trace: Trace) -> Trace:
    """Convert seconds and bytes to milliseconds and MiB."""
    return replace(
        trace,
        began=_scaled(trace.began, _MS),
        ready=tuple(_scaled(row, _MS) for row in trace.ready),
        end=tuple(_scaled(row, _MS) for row in trace.end),
        memory=trace.memory and tuple(_scaled(row, _MIB) for row in trace.memory),
        clock_error=trace.clock_error * _MS,
        phases=tuple(
            tuple(Phase(name, start * _MS, end * _MS) for name, start, end in rank)
            for rank in trace.phases
        ),
    )


def _scaled(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return aligned([header, *rows])


def write_timeline(
    trace: Trace, folder: Path, consumed_samples: int, log: logging.Logger
) -> TimelineRecord:
    """Write the timeline into `folder`, in every format that is available.

        step-10.json         for `python -m pipemega timeline`
        step-10.trace.json   for ui.perfetto.dev
        step-10.html         measured and predicted timelines
        step-10.png          the same, if matplotlib is installed

    If writing fails, a warning is logged and training continues.
    """
    comparison = compare(trace)
    picture = None
    try:
        picture = _write(trace, comparison, folder / f"step-{trace.step}")
    except OSError as error:
        log.warning("the timeline of step %d could not be written: %s", trace.step, error)
    ranks = range(trace.plan.num_ranks)
    timeline = trace.timeline
    return TimelineRecord(
        step=trace.step,
        consumed_samples=consumed_samples,
        schedule=trace.plan.name,
        makespan=timeline.makespan,
        span=timeline.span,
        bubble=timeline.bubble,
        predicted_makespan=comparison.predicted.makespan / _MS,
        busy=tuple(timeline.busy(rank) for rank in ranks),
        waited=tuple(trace.waited(rank) for rank in ranks),
        picture=picture,
    )


def _write(trace: Trace, comparison: Comparison, path: Path) -> Path | None:
    """Write all files; return the picture's path, None without matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(trace.to_json() + "\n", encoding="utf-8")
    path.with_suffix(".trace.json").write_bytes(comparison.render("trace"))
    path.with_suffix(".html").write_bytes(comparison.render("html"))
    try:
        png = comparison.render("png")
    except ConfigError:
        return None
    picture = path.with_suffix(".png")
    picture.write_bytes(png)
    return picture
