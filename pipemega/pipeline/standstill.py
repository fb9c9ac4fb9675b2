"""Where the ranks of a pipeline stood when one of them did not answer, with the plan's table."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pipemega.pipeline.instructions import Instruction, Plan
from pipemega.pipeline.order import excerpt


@dataclass(frozen=True)
class Place:
    """Where one rank stands in a plan.

    Args:
        plan: with its messages, as it is run.
        ranks: the global rank of each pipeline rank.
        rank: the pipeline rank.
        at: which instruction of its program; one past the last where it is done with them.
    """

    plan: Plan
    ranks: tuple[int, ...]
    rank: int
    at: int

    @property
    def table(self) -> str:
        """The plan's table, with an arrow at the place."""
        return excerpt(self.plan, {self.rank: self.at})


def describe(place: Place, at: Mapping[int, int], silent: Collection[int]) -> str:
    """The table with an arrow for every rank, and what is known of those that do not answer.

        rank 1 has done SA0@1 and not yet SA1@1, for which rank 2 waits: it is at one of
        F1@1 SA1@1
            rank 0   F0@0 SA0@0 > F1@0 ..
            ...

    Args:
        place: of any rank of the pipeline; gives the plan.
        at: global rank -> position in its program, of the ranks that have said where they are.
        silent: the global ranks that have said nothing.
    """
    plan, global_ranks = place.plan, place.ranks
    known = {r: at[g] for r, g in enumerate(global_ranks) if g in at}
    marks, lines = dict(known), []
    for rank in range(plan.num_ranks):
        if global_ranks[rank] in silent:
            done, first_waited = _traces(plan, rank, known)
            marks[rank] = done + 1
            lines.append(_last_known(plan, rank, done, first_waited, global_ranks))
    if global_ranks != tuple(range(plan.num_ranks)):
        lines.append(f"pipeline ranks 0 to {plan.num_ranks - 1} are {list(global_ranks)}")
    return "\n".join([*(f"  {line}" for line in lines), excerpt(plan, marks)])


def _traces(
    plan: Plan, silent: int, known: Mapping[int, int]
) -> tuple[int, tuple[int, int] | None]:
    """What the others tell of the silent rank.

    Returns:
        the last position of its program that somebody has had the result of, -1 for none; and the
        first whose result somebody waits for, with that pipeline rank.
    """
    position = {step: at for at, step in enumerate(plan.programs[silent])}
    done, waited = -1, list[tuple[int, int]]()
    for rank, at in known.items():
        program = plan.programs[rank]
        done = max([done, *_positions(plan, program[:at], position)])
        waited += [(need, rank) for need in _positions(plan, program[at : at + 1], position)]
    # What somebody waits for may have been done and lost on the way; not what comes before it.
    return done, min((w for w in waited if w[0] > done), default=None)


def _positions(
    plan: Plan, steps: Iterable[Instruction], position: Mapping[Instruction, int]
) -> list[int]:
    needs = (plan.needs(step) for step in steps)
    return [position[need] for need in needs if need is not None and need in position]


def _last_known(
    plan: Plan,
    rank: int,
    done: int,
    waited: tuple[int, int] | None,
    global_ranks: tuple[int, ...],
    most: int = 12,
) -> str:
    program, name = plan.programs[rank], f"rank {global_ranks[rank]}"
    had = f"has done {program[done]}" if done >= 0 else "has sent nothing in this step"
    if waited is None:
        return f"{name} {had}; nobody waits for more of it"
    need, waiter = waited
    left = [str(step) for step in program[done + 1 : need + 1]]
    if len(left) > most:
        left[most // 2 : -most // 2] = [".."]
    return (
        f"{name} {had} and not yet {program[need]}, for which rank {global_ranks[waiter]} waits: "
        f"it is at one of {' '.join(left)}"
    )
