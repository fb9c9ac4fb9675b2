"""One measured step: when each instruction of each rank waited, worked and ended.

    rank 1    F0@1 |..waits..|==works==| SA0@1 |=| F1@1 ...
                   begin     ready     end

`Trace.timeline` is the same `Timeline` that the simulator makes, of the compute steps alone, so
that whatever draws or judges the one does so with the other. Times are in seconds of the clock of
pipeline rank 0, from the first beginning of any rank.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Plan
from pipemega.pipeline.simulate import Timeline, Times, peak_held

FORMAT = "pipemega trace 1"


class Row(NamedTuple):
    """One instruction as it ran: it waited from `begin` to `ready`, and worked until `end`."""

    step: Instruction
    begin: float
    ready: float
    end: float

    @property
    def wait(self) -> float:
        return self.ready - self.begin


@dataclass(frozen=True)
class Trace:
    """A step of one pipeline, as it was measured.

    Args:
        step: the number of the step in its run, from 1.
        plan: as it was run, messages included.
        began: when each rank began with its program.
        ready, end: of each instruction of each rank; one that waits for a message begins when the
            one before it has ended, and is ready when it has what it waited for.
        memory: bytes in use on each rank before its first instruction and after each; None where
            the machine does not tell.
        clock_error: how far, at most, the clocks of two ranks may be apart after alignment.
    """

    step: int
    plan: Plan
    began: tuple[float, ...]
    ready: Times
    end: Times
    memory: tuple[tuple[int, ...], ...] | None = None
    clock_error: float = 0.0

    def rows(self, rank: int) -> Iterator[Row]:
        """The instructions of `rank`, in order.

        One that waits for no message begins when it is ready: the time before that went into
        weighing the memory.
        """
        last, plan = self.began[rank], self.plan
        for step, ready, end in zip(
            plan.programs[rank], self.ready[rank], self.end[rank], strict=True
        ):
            need = plan.needs(step)
            waits = need is not None and plan.rank_of_stage[need.stage] != rank
            yield Row(step, last if waits else ready, ready, end)
            last = end

    @cached_property
    def timeline(self) -> Timeline:
        """The compute steps, from when they had what they needed.

        Peak is in bytes above what the rank held at the start, between instructions; where memory
        was not measured, in micro-batches, by the plan.
        """
        kept = [
            [row for row in self.rows(rank) if not row.step.kind.is_message]
            for rank in range(self.plan.num_ranks)
        ]
        return Timeline(
            self.plan.compute_only(),
            tuple(tuple(row.ready for row in rows) for rows in kept),
            tuple(tuple(row.end for row in rows) for rows in kept),
            self._peak(),
        )

    def _peak(self) -> tuple[float, ...]:
        if self.memory is not None:
            return tuple(float(max(levels) - levels[0]) for levels in self.memory)
        plan = self.plan.compute_only()
        costs = CostModel.uniform(plan.num_stages)
        return tuple(peak_held(program, costs, plan.forward_only) for program in plan.programs)

    def waited(self, rank: int) -> float:
        """Seconds that `rank` stood waiting for messages."""
        return sum(row.wait for row in self.rows(rank))

    def longest_waits(self, most: int = 5) -> list[tuple[int, Row, Instruction | None]]:
        """(rank, instruction, what it needed), the longest wait first."""
        rows = [(rank, row) for rank in range(self.plan.num_ranks) for row in self.rows(rank)]
        rows.sort(key=lambda entry: -entry[1].wait)
        return [(r, row, self.plan.needs(row.step)) for r, row in rows[:most] if row.wait > 0]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "clock_error": self.clock_error,
                "plan": json.loads(self.plan.to_json()),
                "began": self.began,
                "ready": self.ready,
                "end": self.end,
                "memory": self.memory,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """What `to_json` wrote.

        Raises:
            ScheduleError: it is no measured timeline, or a part of one is missing or wrong.
        """
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"a measured timeline in JSON was expected: {error}") from error
        if not isinstance(written, Mapping) or written.get("format") != FORMAT:
            raise ScheduleError(
                f"this is no measured timeline: its key 'format' should be {FORMAT!r}; runs write "
                f"such files at the steps that monitor.trace names"
            )
        try:
            return _read(written)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(f"the measured timeline is damaged: {_say(error)}") from error


def _read(written: Mapping[str, Any]) -> Trace:
    plan = Plan.from_json(json.dumps(written["plan"]))
    memory = written["memory"]
    trace = Trace(
        int(written["step"]),
        plan,
        tuple(map(float, written["began"])),
        _times(written["ready"]),
        _times(written["end"]),
        None if memory is None else tuple(tuple(map(int, row)) for row in memory),
        float(written["clock_error"]),
    )
    lengths = [len(program) for program in plan.programs]
    for name, rows in (("ready", trace.ready), ("end", trace.end)):
        if [len(row) for row in rows] != lengths:
            raise ValueError(f"{name!r} has not one number for each instruction of its plan")
    if len(trace.began) != len(lengths):
        raise ValueError(f"'began' has {len(trace.began)} numbers for {len(lengths)} ranks")
    if trace.memory and [len(row) - 1 for row in trace.memory] != lengths:
        raise ValueError("'memory' has not one number more than each rank has instructions")
    return trace


def _times(rows: Any) -> Times:
    times = tuple(tuple(map(float, row)) for row in rows)
    if not all(math.isfinite(time) for row in times for time in row):
        raise ValueError("a time is not finite")
    return times


def _say(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return str(error)
