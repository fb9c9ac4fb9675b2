"""Report of the position of each pipeline rank when a rank does not answer."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pipemega.pipeline.plan.execution_order import excerpt
from pipemega.pipeline.plan.instructions import Instruction, Plan


@dataclass(frozen=True)
class PlanPosition:
    """Position of one rank in a plan.

    Args:
        plan: the lowered plan that is run.
        ranks: the global rank of each pipeline rank.
        rank: the pipeline rank.
        at: index of its current instruction; the length of its program if it has finished.
    """

    plan: Plan
    ranks: tuple[int, ...]
    rank: int
    at: int

    @property
    def table(self) -> str:
        """Part of the plan as text, with an arrow at the position."""
        return excerpt(self.plan, {self.rank: self.at})


def describe_deadlock(place: PlanPosition, at: Mapping[int, int], silent: Collection[int]) -> str:
    """Return the positions of all ranks in the plan, and a line for each rank that is silent.

        rank 1 has finished SA0@1 but not SA1@1, which rank 2 waits for: it is at one of
        F1@1 SA1@1
            rank 0   F0@0 SA0@0 > F1@0 ..
            ...

    Args:
        place: of any rank of the pipeline; gives the plan.
        at: global rank -> position in its program, of the ranks that have reported one.
        silent: the global ranks that have not reported.
    """
    plan, global_ranks = place.plan, place.ranks
    known = {r: at[g] for r, g in enumerate(global_ranks) if g in at}
    marks, lines = dict(known), []
    for rank in range(plan.num_ranks):
        if global_ranks[rank] in silent:
            done, missing = _last_progress(plan, rank, known)
            marks[rank] = done + 1
            lines.append(_progress_line(plan, rank, done, missing, global_ranks))
    if global_ranks != tuple(range(plan.num_ranks)):
        lines.append(f"pipeline ranks 0 to {plan.num_ranks - 1} are {list(global_ranks)}")
    return "\n".join([*(f"  {line}" for line in lines), excerpt(plan, marks)])


def _last_progress(
    plan: Plan, silent: int, known: Mapping[int, int]
) -> tuple[int, tuple[int, int] | None]:
    """Return what is known of a silent rank from the positions of the others.

    Returns:
        the last position of its program whose result another rank has used, -1 for none; and the
        first later position whose result another rank waits for, with that pipeline rank.
    """
    position = {step: at for at, step in enumerate(plan.programs[silent])}
    done, waited = -1, list[tuple[int, int]]()
    for rank, at in known.items():
        program = plan.programs[rank]
        done = max([done, *_positions(plan, program[:at], position)])
        waited += [(need, rank) for need in _positions(plan, program[at : at + 1], position)]
    # The missing step itself may have finished, with its message lost.
    return done, min((w for w in waited if w[0] > done), default=None)


def _positions(
    plan: Plan, steps: Iterable[Instruction], position: Mapping[Instruction, int]
) -> list[int]:
    needs = (need for step in steps for need in plan.all_needs(step))
    return [position[need] for need in needs if need in position]


def _progress_line(
    plan: Plan,
    rank: int,
    done: int,
    missing: tuple[int, int] | None,
    global_ranks: tuple[int, ...],
    most: int = 12,
) -> str:
    program, name = plan.programs[rank], f"rank {global_ranks[rank]}"
    progress = f"has finished {program[done]}" if done >= 0 else "has sent nothing in this step"
    if missing is None:
        return f"{name} {progress}; no other rank waits for it"
    need, waiter = missing
    pending = [str(step) for step in program[done + 1 : need + 1]]
    if len(pending) > most:
        pending[most // 2 : -most // 2] = [".."]
    return (
        f"{name} {progress} but not {program[need]}, which rank {global_ranks[waiter]} waits for: "
        f"it is at one of {' '.join(pending)}"
    )
