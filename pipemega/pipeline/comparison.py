"""A measured step beside the same plan as the simulator plays it with the costs that were measured.

Where the two differ, something other than the plan and the usual speed of its steps was at work: a
step that took longer than it usually does, messages that came late, a rank that was busy elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.measured import measured_costs
from pipemega.pipeline.pictures import Panel, html, png, svg, trace
from pipemega.pipeline.render import draw
from pipemega.pipeline.simulate import Timeline, simulate
from pipemega.pipeline.trace import Trace

_MS, _MIB = 1e3, 2.0**-20


@dataclass(frozen=True)
class Comparison:
    """Both timelines, in milliseconds and, where memory was measured, MiB.

    Args:
        trace: the step.
        costs: measured in it.
        predicted, measured: times in milliseconds.
    """

    trace: Trace
    costs: CostModel
    predicted: Timeline
    measured: Timeline

    @property
    def memory_unit(self) -> str:
        return "micro-batches" if self.trace.memory is None else "MiB"

    @property
    def panels(self) -> tuple[Panel, Panel]:
        """The measured one first."""
        plan = self.measured.plan
        name = f"{plan.name}, step {self.trace.step}"
        return (
            Panel(self.measured, f"measured: {name}", self.costs),
            Panel(self.predicted, "predicted, of the measured costs", self.costs),
        )

    def png(self) -> bytes:
        """Raises: ConfigError: matplotlib is not installed."""
        return png(self.panels, unit="ms", memory_unit=self.memory_unit)

    def svg(self) -> str:
        """Raises: ConfigError: matplotlib is not installed."""
        return svg(self.panels, unit="ms", memory_unit=self.memory_unit)

    def html(self) -> str:
        return html(
            self.panels,
            unit="ms",
            memory_unit=self.memory_unit,
            title=f"{self.measured.plan.name}, step {self.trace.step}",
        )

    def chrome_trace(self) -> str:
        return trace(self.panels, unit="ms", memory_unit=self.memory_unit)

    def text(self, width: int = 120) -> str:
        """Both drawings, the figures of both, of each rank and stage, and the longest waits."""
        plan, step = self.measured.plan, self.trace
        parts = [
            f"step {step.step}: {plan.name}, {plan.num_ranks} ranks, {plan.num_stages} stages, "
            f"{plan.num_microbatches} micro-batches",
            f"measured\n{draw(self.measured, width)}",
            f"predicted, of the measured costs\n{draw(self.predicted, width)}",
            _table(("", "measured", "predicted"), self._figures()),
            _table(*self._by_rank()),
            _table(*self._by_stage()),
            f"message between ranks {self.costs.message:.4g} ms; the clocks of the ranks agree to "
            f"{step.clock_error * _MS:.3g} ms",
            *self._waits(),
        ]
        return "\n\n".join(parts)

    def _figures(self) -> list[tuple[str, ...]]:
        figures: list[tuple[str, Callable[[Timeline], str]]] = [
            ("makespan, ms", lambda t: f"{t.makespan:.4g}"),
            ("span, ms", lambda t: f"{t.span:.4g}"),
            ("bubble", lambda t: f"{t.bubble:.2%}"),
            (f"most held, {self.memory_unit}", lambda t: f"{max(t.peak):.4g}"),
        ]
        return [(name, show(self.measured), show(self.predicted)) for name, show in figures]

    def _by_rank(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        unit = self.memory_unit
        header: tuple[str, ...] = ("rank", "busy, ms", "waited, ms", "bubble", f"held, {unit}")
        rows: list[tuple[str, ...]] = [
            (
                str(rank),
                f"{self.measured.busy(rank):.4g}",
                f"{self.trace.waited(rank) * _MS:.4g}",
                f"{self.measured.bubble_of(rank):.2%}",
                f"{self.measured.peak[rank]:.4g}",
            )
            for rank in range(self.measured.plan.num_ranks)
        ]
        return header, rows

    def _by_stage(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        costs, unit = self.costs, self.memory_unit
        header = ("stage", "F, ms", "I, ms", "W, ms", "B, ms", f"F holds, {unit}", f"I, {unit}")
        columns = (
            costs.forward,
            costs.backward_input,
            costs.backward_weight,
            costs.whole_backward,
            costs.held_after_forward,
            costs.held_after_input,
        )
        rows = enumerate(zip(*columns, strict=True))
        return header, [(str(stage), *(f"{n:.4g}" for n in row)) for stage, row in rows]

    def _waits(self) -> list[str]:
        waits = [
            f"  rank {rank}  {row.wait * _MS:8.4g} ms at {row.step} for {need}"
            for rank, row, need in self.trace.longest_waits()
        ]
        return ["\n".join(("the longest waits", *waits))] if waits else []


def compare(trace: Trace) -> Comparison:
    """Plays the plan of `trace` with its own costs."""
    costs = _scaled(measured_costs([trace]))
    measured = trace.timeline
    held = 1.0 if trace.memory is None else _MIB
    in_ms = Timeline(
        measured.plan,
        tuple(tuple(time * _MS for time in row) for row in measured.start),
        tuple(tuple(time * _MS for time in row) for row in measured.end),
        tuple(peak * held for peak in measured.peak),
    )
    return Comparison(trace, costs, simulate(measured.plan, costs), in_ms)


def _scaled(costs: CostModel) -> CostModel:
    """Seconds and bytes to milliseconds and MiB."""

    def times(values: Sequence[float], by: float = _MS) -> tuple[float, ...]:
        return tuple(value * by for value in values)

    return replace(
        costs,
        forward=times(costs.forward),
        backward_input=times(costs.backward_input),
        backward_weight=times(costs.backward_weight),
        backward=None if costs.backward is None else times(costs.backward),
        activation=None if costs.activation is None else times(costs.activation, _MIB),
        kept=None if costs.kept is None else times(costs.kept, _MIB),
        message=costs.message * _MS,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of words, the figures to the right."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
