"""Draws timelines as text: one row per rank, time from left to right.

    rank 0   F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1   .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..

One column is as long as the shortest step; `--` means that the previous step continues, `..` that
the rank is idle. If ranks hold two stages, the steps of the second one are in lower case; if they
hold more, each step names its stage, `F0@4`. If the row is too wide, numbers are left out:

    rank 0   FFF....B-FB-.B-.B-
    rank 1   .FF..B-FB-FB-.B-..

If times are not multiples of each other, as in a measured timeline, the timeline is drawn to scale:
a column is an equal part of the makespan, a step has its number if that fits, and steps shorter
than half a column may be missing:

    rank 0   F0-F1--.......B0----F2--B1-----F3-B2-----...B3-----
    rank 1   ....F0-B0-----F1-B1----.F2--B2----F3--B3----.......

The phases of a measured step around its pipeline are drawn with one letter each, `dd` for data.
"""

from collections.abc import Callable, Iterator

from pipemega.monitor.timers import PHASES, PhasesByRank
from pipemega.pipeline.plan.instructions import Instruction, Plan
from pipemega.pipeline.plan.simulate import Timeline

_ROUNDING = 1e-9
_PHASE_LETTERS = dict(zip(PHASES, "dtrnog~", strict=True))


def draw_text(
    timeline: Timeline, width: int = 120, max_ranks: int = 32, phases: PhasesByRank = ()
) -> str:
    """Return the timeline as text, one row per rank, at most `width` characters wide.

    If it is too wide, each column becomes one letter; if it is still too wide, the middle is left
    out, and the last line says how much. A step that took no time also gets a column. Uneven times
    are drawn to scale, see above.

    Args:
        phases: for each rank, the phases of the step outside of its pipeline.
    """
    plan = timeline.plan
    tick = None if phases else _tick(timeline)
    if tick is None:
        return _to_scale(timeline, width, max_ranks, phases)
    rows = [_columns(timeline, rank, tick) for rank in range(plan.num_ranks)]
    columns = max(map(len, rows))
    for row in rows:
        row += ["."] * (columns - len(row))
    margin = len(f"rank {plan.num_ranks - 1}") + 3
    cell = max(len(word) for row in rows for word in row)
    cut = 0
    if (cell + 1) * columns - 1 > width - margin:
        cell = 1
        cut = max(0, columns - max(2, width - margin - 3))
    lines = [
        f"rank {rank}".ljust(margin) + _line(row, cell, cut)
        for rank, row in enumerate(rows[:max_ranks])
    ]
    if cut or plan.num_ranks > max_ranks:
        lines.append(
            f"(drawn: {columns - cut} of {columns} columns, {min(max_ranks, plan.num_ranks)} of "
            f"{plan.num_ranks} ranks)"
        )
    return "\n".join(lines)


def _line(row: list[str], cell: int, cut: int) -> str:
    """Return the columns of one rank, `cell` characters each, without `cut` in the middle."""
    space = " " if cell > 1 else ""
    words = [word * cell if word in ("-", ".") else word[:cell].ljust(cell) for word in row]
    left = (len(words) - cut + 1) // 2
    if not cut:
        return space.join(words).rstrip()
    return space.join(words[:left]) + " … " + space.join(words[left + cut :])


def _tick(timeline: Timeline) -> float | None:
    """Return the time of one column: the shortest step, or half of it, if all steps are multiples.

    None if neither fits, as with measured times.
    """
    times = sorted({end - start for start, end in _intervals(timeline)})
    shortest = next((time for time in times if time > _ROUNDING), 1.0)
    for tick in (shortest, shortest / 2):
        if all(abs(time / tick - round(time / tick)) < 1e-6 for time in times):
            return tick
    return None


def _to_scale(timeline: Timeline, width: int, max_ranks: int, phases: PhasesByRank) -> str:
    """Draw to scale: each column is an equal part of the whole time."""
    plan = timeline.plan
    drawn_phases = [phase for rank in phases for phase in rank]
    intervals = [*_intervals(timeline), *((p.start, p.end) for p in drawn_phases)]
    origin = min(start for start, _ in intervals)
    margin = len(f"rank {plan.num_ranks - 1}") + 3
    columns = max(2, width - margin)
    tick = (max(end for _, end in intervals) - origin) / columns
    word = _words(plan)
    lines = []
    for rank in range(min(plan.num_ranks, max_ranks)):
        row = ["."] * columns
        for name, start, end in phases[rank] if phases else ():
            first, last = round((start - origin) / tick), round((end - origin) / tick)
            row[first:last] = _PHASE_LETTERS[name] * (last - first)
        for step, start, end in timeline.steps(rank):
            first, last = round((start - origin) / tick), round((end - origin) / tick)
            drawn = word(step) if len(word(step)) <= last - first else word(step)[0]
            row[first:last] = drawn.ljust(last - first, "-")[: last - first]
        lines.append(f"rank {rank}".ljust(margin) + "".join(row))
    ranks = f"; {max_ranks} of {plan.num_ranks} ranks" if plan.num_ranks > max_ranks else ""
    names = dict.fromkeys(phase.name for phase in drawn_phases)
    letters = "".join(f"; {_PHASE_LETTERS[name]} {name}" for name in names)
    return "\n".join([*lines, f"(drawn to scale: {columns} columns of {tick:.3g}{ranks}{letters})"])


def _intervals(timeline: Timeline) -> Iterator[tuple[float, float]]:
    for rank in range(timeline.plan.num_ranks):
        yield from zip(timeline.start[rank], timeline.end[rank], strict=True)


def _columns(timeline: Timeline, rank: int, tick: float) -> list[str]:
    """Return one word per column: a step at its start, "-" while it continues, "." if idle."""
    origin = min(start for start, _ in _intervals(timeline))
    columns: list[str] = []
    word = _words(timeline.plan)
    for step, start, end in timeline.steps(rank):
        first = int((start - origin) / tick + _ROUNDING)
        last = int((end - origin) / tick + _ROUNDING)
        columns += ["."] * (first - len(columns))
        columns.append(word(step))
        columns += ["-"] * (last - len(columns))
    return columns


def _words(plan: Plan) -> Callable[[Instruction], str]:
    """Return the function that writes a step of `plan` as a word."""
    stages = [plan.stages_of(rank) for rank in range(plan.num_ranks)]
    if max(map(len, stages)) > 2:
        return str
    second = {held[1] for held in stages if len(held) == 2}

    def word(step: Instruction) -> str:
        letter = step.kind.value
        return f"{letter.lower() if step.stage in second else letter}{step.microbatch}"

    return word
