"""One measured step: when each instruction of each rank waited, ran and ended.

    rank 1    F0@1 |..waits..|==runs===| SA0@1 |=| F1@1 ...
                   begin     ready     end

`Trace.timeline` is a `Timeline` of the compute steps, the class that the simulator returns, so all
code that draws or evaluates a simulation also works on a measured step. Times are in seconds on the
clock of pipeline rank 0; 0 is when the first rank began.

Estimates the offset between the clocks of two processes from barriers that both took part in.

No process leaves a barrier (or an all-reduce) before every process has entered it. If the other
clock is ahead of ours by `offset`:

    theirs.enter - offset <= ours.leave          ours.enter <= theirs.leave - offset

Each barrier gives these two bounds, and the offset satisfies all of them. Short barriers give tight
bounds: as with a ping, the error is at most half of the round trip. One barrier serves all ranks at
once, on any backend.

Source: the bounds of Cristian's algorithm (Cristian 1989, Distributed Computing 3).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipemega.errors import ScheduleError
from pipemega.monitor.timers import OTHER, PHASES, PIPELINE, Phase
from pipemega.pipeline.plan.instructions import Instruction, Plan
from pipemega.pipeline.plan.simulate import CostModel, Timeline, Times, peak_held

FORMAT = "pipemega trace 1"

# The parts of a step, in the order of a step.
PARTS = (*PHASES[:2], "compute", "wait", "messages", *PHASES[2:])


class Row(NamedTuple):
    """Times of one instruction: it waited from `begin` to `ready` and ran until `end`."""

    step: Instruction
    begin: float
    ready: float
    end: float

    @property
    def wait(self) -> float:
        return self.ready - self.begin


@dataclass(frozen=True)
class Trace:
    """The measured times of one step of one pipeline.

    Args:
        step: the number of the step in its run, from 1.
        plan: the plan that ran, with its messages.
        began: when each rank began its program.
        ready, end: for each rank, the times of its instructions. An instruction that waits for a
            message begins when the previous one ends, and is ready when the message has arrived.
        memory: for each rank, bytes in use before its first instruction and after each; None if not
            measured.
        phases: for each rank, the phases of its whole step, without gaps; empty if not measured.
        clock_error: maximum difference in seconds between the clocks of two ranks after alignment.
    """

    step: int
    plan: Plan
    began: tuple[float, ...]
    ready: Times
    end: Times
    memory: tuple[tuple[float, ...], ...] | None = None
    clock_error: float = 0.0
    phases: tuple[tuple[Phase, ...], ...] = ()

    def rows(self, rank: int) -> Iterator[Row]:
        """Yield the instructions of `rank` in order.

        An instruction that waits for no message begins when it is ready: the time before that was
        spent on measuring memory.
        """
        last, plan = self.began[rank], self.plan
        times = zip(plan.programs[rank], self.ready[rank], self.end[rank], strict=True)
        for step, ready, end in times:
            waits = plan.remote_need(step) is not None
            yield Row(step, last if waits else ready, ready, end)
            last = end

    @cached_property
    def timeline(self) -> Timeline:
        """The compute steps, each from `ready` to `end`.

        `peak` is in bytes above the memory in use at the start, read between instructions. If
        memory was not measured, it is in micro-batches and comes from the plan.
        """
        computed = [
            [row for row in self.rows(rank) if not row.step.kind.is_message]
            for rank in range(self.plan.num_ranks)
        ]
        return Timeline(
            self.plan.compute_only(),
            tuple(tuple(row.ready for row in rows) for rows in computed),
            tuple(tuple(row.end for row in rows) for rows in computed),
            self._peak(),
        )

    def _peak(self) -> tuple[float, ...]:
        if self.memory is not None:
            return tuple(float(max(levels) - levels[0]) for levels in self.memory)
        plan = self.plan.compute_only()
        costs = CostModel.uniform(plan.num_stages)
        return tuple(peak_held(program, costs, plan.forward_only) for program in plan.programs)

    def waited(self, rank: int) -> float:
        """Return the seconds that `rank` waited for messages."""
        return sum(row.wait for row in self.rows(rank))

    def step_time(self, rank: int) -> float:
        """Return the seconds of the whole step on `rank`; 0 if its phases were not measured."""
        return sum(phase.end - phase.start for phase in self._phases_of(rank))

    @property
    def step_interval(self) -> float:
        """Seconds from the start of the step on the first rank to its end on the last one."""
        starts = [phases[0].start for phases in self.phases if phases]
        ends = [phases[-1].end for phases in self.phases if phases]
        return max(ends) - min(starts) if starts else 0.0

    def parts(self, rank: int) -> dict[str, float]:
        """Return the seconds of each part of the step on `rank`; they add up to `step_time`.

        The pipeline is divided into compute, wait (for messages) and messages. What belongs to no
        other part is "other".
        """
        found = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._phases_of(rank):
            if name != PIPELINE:
                found[name] = found.get(name, 0.0) + end - start
                continue
            found[OTHER] += end - start
        elsewhere = [phase for phase in self._phases_of(rank) if phase.name != PIPELINE]
        for row in self.rows(rank):
            # With post-validation, the norm is awaited between two instructions.
            wait = row.wait - sum(
                max(0.0, min(phase.end, row.ready) - max(phase.start, row.begin))
                for phase in elsewhere
            )
            found["messages" if row.step.kind.is_message else "compute"] += row.end - row.ready
            found["wait"] += wait
            found[OTHER] -= row.end - row.ready + wait
        return found

    def _phases_of(self, rank: int) -> tuple[Phase, ...]:
        return self.phases[rank] if self.phases else ()

    def longest_waits(self, most: int = 5) -> list[tuple[int, Row, Instruction | None]]:
        """Return (rank, instruction, the step it waited for), longest wait first."""
        rows = [(rank, row) for rank in range(self.plan.num_ranks) for row in self.rows(rank)]
        rows.sort(key=lambda entry: -entry[1].wait)
        return [(r, row, self.plan.needs(row.step)) for r, row in rows[:most] if row.wait > 0]

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
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
                "phases": self.phases,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """Read the JSON text that `to_json` wrote.

        Raises:
            ScheduleError: the text is not a measured timeline, or a part is missing or wrong.
        """
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"expected a measured timeline in JSON: {error}") from error
        if not isinstance(written, Mapping) or written.get("format") != FORMAT:
            raise ScheduleError(
                f"this is not a measured timeline: its key 'format' should be {FORMAT!r}; a "
                f"run writes such a file at each step listed in monitor.trace"
            )
        try:
            return _read(written)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(f"the measured timeline is damaged: {_describe(error)}") from error


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
        # Files of earlier versions have no phases.
        tuple(
            tuple(Phase(str(name), float(start), float(end)) for name, start, end in rank)
            for rank in written.get("phases", ())
        ),
    )
    lengths = [len(program) for program in plan.programs]
    for name, rows in (("ready", trace.ready), ("end", trace.end)):
        if [len(row) for row in rows] != lengths:
            raise ValueError(f"{name!r} needs one number per instruction of the plan")
    names = {phase.name for rank in trace.phases for phase in rank}
    if unknown := names - {PIPELINE, *PHASES}:
        raise ValueError(f"'phases' has the unknown name {min(unknown)!r}")
    if len(trace.phases) not in (0, len(lengths)):
        raise ValueError(f"'phases' has {len(trace.phases)} lists for {len(lengths)} ranks")
    if len(trace.began) != len(lengths):
        raise ValueError(f"'began' has {len(trace.began)} numbers for {len(lengths)} ranks")
    if trace.memory and [len(row) - 1 for row in trace.memory] != lengths:
        raise ValueError("'memory' needs one number more than there are instructions, on each rank")
    return trace


def _times(rows: Any) -> Times:
    times = tuple(tuple(map(float, row)) for row in rows)
    if not all(math.isfinite(time) for row in times for time in row):
        raise ValueError("a time is not finite")
    return times


def _describe(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return str(error)


class ClockSample(NamedTuple):
    """When one process entered and left one barrier, in nanoseconds of its own clock."""

    enter: int
    leave: int


def clock_offset(ours: Sequence[ClockSample], theirs: Sequence[ClockSample]) -> tuple[float, float]:
    """Return (how far their clock is ahead of ours, maximum error of that number).

    Args:
        ours, theirs: samples of the same barriers in the same order; at least one.
    """
    pairs = list(zip(ours, theirs, strict=True))
    lowest = max(other.enter - own.leave for own, other in pairs)
    highest = min(other.leave - own.enter for own, other in pairs)
    return (lowest + highest) / 2, abs(highest - lowest) / 2
