"""In which order the instructions of a plan can run, and who stands in whose way if none can.

Each rank runs its own program from front to back, and an instruction waits for the one that it
needs (`Plan.needs`), on this rank or another. Nothing else waits: sends are asynchronous, and a
receive is only posted. Where sends wait as well (`meeting`), each does until its receive is posted.
"""

from collections.abc import Iterator, Mapping

from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program

# From a send to its receive, and how far the receiver's stage is from the sender's.
RECEIVE_OF = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, +1),
    Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, -1),
}


def running_order(
    plan: Plan, meeting: bool = False
) -> Iterator[tuple[int, Instruction, Instruction | None]]:
    """Every instruction of `plan` after what it needs: (rank, instruction, what it needed).

    With `meeting`, a send also waits for its receive to be posted, as where the transport keeps
    nothing in between and the sender does nothing else meanwhile.

    Takes time in proportion to the instructions: a rank that must wait is woken by the
    instruction that it waits for.

    Raises:
        ScheduleError: the plan stands still, once all has run that could; the message says who
            waits for what.
    """
    done: set[Instruction] = set()
    waiting: dict[Instruction, list[int]] = {}
    cursor = [0] * plan.num_ranks
    awake = list(reversed(range(plan.num_ranks)))
    while awake:
        rank = awake.pop()
        program, at = plan.programs[rank], cursor[rank]
        while at < len(program):
            step = program[at]
            need = plan.needs(step)
            if meeting and need in done and step.kind in RECEIVE_OF:
                need = _receive_of(step)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            yield rank, step, need
            done.add(step)
            at += 1
            if step in waiting:
                awake += waiting.pop(step)
        cursor[rank] = at
    stuck = {r: at for r, at in enumerate(cursor) if at < len(plan.programs[r])}
    if stuck:
        how = " where each send waits for its receive" if meeting else ""
        missing = {rank: need for need, ranks in waiting.items() for rank in ranks}
        raise ScheduleError(
            f"schedule {plan.name!r} stands still{how}:\n{_who_waits(plan, stuck, missing)}"
        )


def last_gradients(program: Program) -> frozenset[Instruction]:
    """Of each stage of a rank the backward, or weight half, behind which its gradients are final.

    Never an input half: weights get their gradients in W.
    """
    last = {
        step.stage: step for step in program if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    }
    return frozenset(last.values())


def _receive_of(send: Instruction) -> Instruction:
    kind, away = RECEIVE_OF[send.kind]
    return Instruction(kind, send.stage + away, send.microbatch)


def _who_waits(plan: Plan, stuck: Mapping[int, int], missing: Mapping[int, Instruction]) -> str:
    """The ring of ranks that wait for each other, how many stand behind them, and the table."""
    ring = _ring(plan, missing)
    waits = []
    for rank in ring:
        step = plan.programs[rank][stuck[rank]]
        waits.append(f"  rank {rank} waits at {step} for {missing[rank]}")
    if behind := len(stuck) - len(ring):
        waits.append(f"  and {behind} more behind them")
    ring_first = {rank: stuck[rank] for rank in (*ring, *stuck)}
    return "\n".join([*waits, excerpt(plan, ring_first)])


def _ring(plan: Plan, missing: Mapping[int, Instruction]) -> list[int]:
    """The ranks that nobody else can free, in order; one, where it waits for itself.

    Args:
        missing: what each rank that stands still waits for.
    """
    path: list[int] = []
    rank = min(missing)
    while rank not in path:
        path.append(rank)
        holder = plan.rank_of_stage[missing[rank].stage]
        if holder not in missing:  # it ran to its end, and what was needed is not in it
            return [rank]
        rank = holder
    return sorted(path[path.index(rank) :])


def excerpt(plan: Plan, marks: Mapping[int, int], around: int = 5, most: int = 16) -> str:
    """The part of the plan's table that a message is about, one row per rank.

        rank 0   F0@0 F1@0 > B0@0
        rank 1   > F1@1 F0@1 B0@1 ..

    Args:
        marks: rank -> position in its program; an arrow stands before it, or at the end of a
            program that was run through.
        around: instructions to show on either side; `..` stands for the others.
        most: rows to show, the marked ones before the others.
    """
    chosen = list(dict.fromkeys((*marks, *range(plan.num_ranks))))[:most]
    rows = [
        f"    rank {rank:<3} {_row(plan.programs[rank], marks.get(rank), around)}"
        for rank in sorted(chosen)
    ]
    if plan.num_ranks > most:
        rows.append(f"    and {plan.num_ranks - most} ranks more")
    return "\n".join(rows)


def _row(program: Program, mark: int | None, around: int) -> str:
    start = max(0, (mark or 0) - around)
    stop = (mark or 0) + around + 1
    words = [
        f"> {step}" if at == mark else str(step)
        for at, step in enumerate(program[start:stop], start)
    ]
    words += [">"] * (mark == len(program))
    return " ".join([".."] * (start > 0) + words + [".."] * (stop < len(program)))
