"""Plans and timelines as people look at them: ranks down, time across.

    rank 0   F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1   .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..

One column is as long as the shortest step; `--` means that the step before goes on, `..` that the
rank waits. Where ranks hold two stages, the steps of the second are in small letters; where they
hold more, each step names its stage, `F0@4`. What is too wide is drawn without numbers:

    rank 0   FFF....B-FB-.B-.B-
    rank 1   .FF..B-FB-FB-.B-..

Times that are no multiples of one another, as those of a measured timeline, are drawn to scale: a
column is one part of the width, a step has its number where it is long enough to hold it, and what
is shorter than half a column may be missing:

    rank 0   F0-F1--.......B0----F2--B1-----F3-B2-----...B3-----
    rank 1   ....F0-B0-----F1-B1----.F2--B2----F3--B3----.......
"""

from collections.abc import Callable, Iterator

from pipemega.pipeline.instructions import Instruction, Plan
from pipemega.pipeline.schedules import SCHEDULES, Sizes
from pipemega.pipeline.simulate import Timeline

_ROUNDING = 1e-9


def draw(timeline: Timeline, width: int = 120, max_ranks: int = 32) -> str:
    """The timeline as text, one row per rank, at most `width` characters wide.

    A timeline too long for that is drawn with one letter per column, and if that is still too long,
    its middle is left out; a last line says what is missing. A step that took no time gets a
    column all the same, so that none is lost. Uneven times are drawn to scale, see above.
    """
    plan = timeline.plan
    tick = _tick(timeline)
    if tick is None:
        return _to_scale(timeline, width, max_ranks)
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
    """The columns of one rank, `cell` characters each, without `cut` of them in the middle."""
    space = " " if cell > 1 else ""
    words = [word * cell if word in ("-", ".") else word[:cell].ljust(cell) for word in row]
    left = (len(words) - cut + 1) // 2
    if not cut:
        return space.join(words).rstrip()
    return space.join(words[:left]) + " … " + space.join(words[left + cut :])


def _tick(timeline: Timeline) -> float | None:
    """How long one column is: the shortest step, or half of it where that fits all the others.

    None where neither fits, as with measured times.
    """
    times = sorted({end - start for start, end in _intervals(timeline)})
    shortest = next((time for time in times if time > _ROUNDING), 1.0)
    for tick in (shortest, shortest / 2):
        if all(abs(time / tick - round(time / tick)) < 1e-6 for time in times):
            return tick
    return None


def _to_scale(timeline: Timeline, width: int, max_ranks: int) -> str:
    """A column is an equal part of the makespan; steps are cut to the columns that they fill."""
    plan, origin = timeline.plan, min(start for start, _ in _intervals(timeline))
    margin = len(f"rank {plan.num_ranks - 1}") + 3
    columns = max(2, width - margin)
    tick = timeline.makespan / columns
    word = _words(plan)
    lines = []
    for rank in range(min(plan.num_ranks, max_ranks)):
        row = ["."] * columns
        for step, start, end in timeline.steps(rank):
            first, last = round((start - origin) / tick), round((end - origin) / tick)
            drawn = word(step) if len(word(step)) <= last - first else word(step)[0]
            row[first:last] = drawn.ljust(last - first, "-")[: last - first]
        lines.append(f"rank {rank}".ljust(margin) + "".join(row))
    of = f"; {max_ranks} of {plan.num_ranks} ranks" if plan.num_ranks > max_ranks else ""
    return "\n".join([*lines, f"(drawn to scale: {columns} columns of {tick:.3g}{of})"])


def _intervals(timeline: Timeline) -> Iterator[tuple[float, float]]:
    for rank in range(timeline.plan.num_ranks):
        yield from zip(timeline.start[rank], timeline.end[rank], strict=True)


def _columns(timeline: Timeline, rank: int, tick: float) -> list[str]:
    """One word per column: a step where it starts, "-" while it goes on, "." while none runs."""
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
    """How the steps of `plan` are written."""
    stages = [plan.stages_of(rank) for rank in range(plan.num_ranks)]
    if max(map(len, stages)) > 2:
        return str
    second = {held[1] for held in stages if len(held) == 2}

    def word(step: Instruction) -> str:
        letter = step.kind.value
        return f"{letter.lower() if step.stage in second else letter}{step.microbatch}"

    return word


def table_of_schedules(pp_size: int = 4, num_microbatches: int = 8) -> str:
    """A table in Markdown of every schedule that there is, with its formulas and an example."""
    header = (
        "schedule",
        "stages per rank",
        "makespan",
        "exact where",
        f"bubble at p={pp_size}, m={num_microbatches}",
        "peak micro-batches on rank r",
        "source",
    )
    rows = []
    for family in SCHEDULES.values():
        sizes = Sizes(pp_size, num_microbatches, family.usual_chunks)
        aliases = "".join(f", `{alias}`" for alias in family.aliases)
        stages = "any" if family.chunks is None else str(family.chunks)
        rows.append(
            (
                f"`{family.name}`{aliases}",
                stages + (", in a v" if family.placement == "v" else ""),
                f"`{family.makespan_formula}`",
                "always" if family.exact_formula == "True" else f"`{family.exact_formula}`",
                f"{family.bubble(sizes):.1%}",
                f"`{family.peak_formula}`",
                family.source,
            )
        )
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
