"""A possible execution order of the instructions of a plan, or a report of its deadlock.

Each rank runs its program in order, and an instruction waits for those that it needs
(`Plan.all_needs`), on the same or other ranks. Nothing else waits: sends are asynchronous, and a
receive is only posted.
"""

from collections.abc import Iterator, Mapping

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program


def execution_order(plan: Plan) -> Iterator[tuple[int, Instruction, tuple[Instruction, ...]]]:
    """Yield every instruction after those that it needs: (rank, instruction, needed ones).

    Takes time proportional to the number of instructions.

    Raises:
        ScheduleError: the plan deadlocks, after all possible instructions were yielded; the message
            says which ranks wait for what.
    """
    done: set[Instruction] = set()
    waiting: dict[Instruction, list[int]] = {}
    position = [0] * plan.num_ranks
    runnable = list(reversed(range(plan.num_ranks)))
    while runnable:
        rank = runnable.pop()
        program, at = plan.programs[rank], position[rank]
        while at < len(program):
            step = program[at]
            needs = plan.all_needs(step)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, step, needs
            done.add(step)
            at += 1
            if step in waiting:
                runnable += waiting.pop(step)
        position[rank] = at
    stuck = {r: at for r, at in enumerate(position) if at < len(plan.programs[r])}
    if stuck:
        needed = {rank: need for need, ranks in waiting.items() for rank in ranks}
        waits = _describe_waits(plan, stuck, needed)
        raise ScheduleError(f"schedule {plan.name!r} deadlocks:\n{waits}")


def last_gradients(program: Program) -> frozenset[Instruction]:
    """Return the last B or W of each stage of a rank; after it the gradients are complete.

    Never an I, because weights get their gradients in W.
    """
    last = {s.stage: s for s in program if s.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    return frozenset(last.values())


def _describe_waits(plan: Plan, stuck: Mapping[int, int], needed: Mapping[int, Instruction]) -> str:
    """Describe the cycle of ranks that wait for each other, and show their part of the plan."""
    cycle = cycle_of({r: plan.rank_of(need) for r, need in needed.items()})
    waits = []
    for rank in cycle:
        step = plan.programs[rank][stuck[rank]]
        waits.append(f"  rank {rank} waits at {step} for {needed[rank]}")
    if others := len(stuck) - len(cycle):
        waits.append(f"  and {others} more ranks wait for them")
    cycle_first = {rank: stuck[rank] for rank in (*cycle, *stuck)}
    return "\n".join([*waits, excerpt(plan, cycle_first)])


def cycle_of(waits_for: Mapping[int, int]) -> list[int]:
    """Return the ranks that wait for each other, sorted; a single one if it waits for itself.

    Args:
        waits_for: stuck rank -> the rank that it waits for.
    """
    path: list[int] = []
    rank = min(waits_for)
    while rank not in path:
        path.append(rank)
        if waits_for[rank] not in waits_for:  # it has finished, without what the rank needs
            return [rank]
        rank = waits_for[rank]
    return sorted(path[path.index(rank) :])


def excerpt(plan: Plan, marks: Mapping[int, int], around: int = 5, most: int = 16) -> str:
    """Return part of the plan as text, one row per rank.

        rank 0   F0@0 F1@0 > B0@0
        rank 1   > F1@1 F0@1 B0@1 ..

    Args:
        marks: rank -> position in its program; an arrow marks it, at the end of the row if the rank
            has finished.
        around: instructions shown on either side; `..` stands for the others.
        most: number of rows; marked ranks are shown first.
    """
    chosen = list(dict.fromkeys((*marks, *range(plan.num_ranks))))[:most]
    chosen = sorted(chosen)
    rows = [f"    rank {r:<3} {_row(plan.programs[r], marks.get(r), around)}" for r in chosen]
    if plan.num_ranks > most:
        rows.append(f"    and {plan.num_ranks - most} more ranks")
    return "\n".join(rows)


def _row(program: Program, mark: int | None, around: int) -> str:
    start = max(0, (mark or 0) - around)
    stop = (mark or 0) + around + 1
    shown = enumerate(program[start:stop], start)
    words = [f"> {step}" if at == mark else str(step) for at, step in shown]
    words += [">"] * (mark == len(program))
    return " ".join([".."] * (start > 0) + words + [".."] * (stop < len(program)))
