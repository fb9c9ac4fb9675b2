"""Plans for tests: hand-made ones, and random valid ones."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from pipemega.pipeline.plan.channels import channels, queues_of
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.schedules.building_blocks import loop, v

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def hand_made(*rows: str, rank_of_stage: tuple[int, ...] | None = None) -> Plan:
    """Return the plan with one row per rank; `F0` means `F0@rank`."""
    programs = tuple(
        tuple(Instruction.parse(word if "@" in word else f"{word}@{rank}") for word in row.split())
        for rank, row in enumerate(rows)
    )
    num_microbatches = 1 + max(step.microbatch for program in programs for step in program)
    return Plan("hand-made", num_microbatches, rank_of_stage or loop(len(rows)), programs)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Return a loop or v of one to three chunks on one to four ranks, or a random placement."""
    num_ranks = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return draw(st.sampled_from([loop, v]))(num_ranks, draw(st.integers(1, 3)))
    rest = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    return tuple(draw(st.permutations([*range(num_ranks), *rest])))


@st.composite
def valid_plans(draw: st.DrawFn) -> Plan:
    """Return a random valid plan: repeatedly append any step that can run.

    Backwards are whole or split at random, and micro-batches may overtake each other.
    """
    rank_of_stage, num_microbatches = draw(placements()), draw(st.integers(1, 4))
    last = len(rank_of_stage) - 1
    programs: list[list[Instruction]] = [[] for _ in range(max(rank_of_stage) + 1)]
    open_steps = [Instruction(F, 0, m) for m in range(num_microbatches)]
    while open_steps:
        step = open_steps.pop(draw(st.integers(0, len(open_steps) - 1)))
        programs[rank_of_stage[step.stage]].append(step)
        kind, stage, _ = step
        backward = draw(st.sampled_from([B, I]))
        if kind is F:
            after = [step._replace(stage=stage + 1)]
            open_steps += after if stage < last else [step._replace(kind=backward)]
        if kind is I:
            open_steps.append(step._replace(kind=W))
        if kind in (B, I) and stage > 0:
            open_steps.append(step._replace(kind=backward, stage=stage - 1))
    return Plan("random", num_microbatches, rank_of_stage, tuple(map(tuple, programs)))


def runs_to_the_end(plan: Plan) -> bool:
    """Return whether all compute steps of `plan` can run, by trying ranks in turn; slow."""
    done: set[tuple[Kind, int, int]] = set()

    def can_run(step: Instruction) -> bool:
        kind, stage, m = step
        if kind is F:
            return stage == 0 or (F, stage - 1, m) in done
        if kind is W:
            return (I, stage, m) in done
        if stage == plan.num_stages - 1:
            return (F, stage, m) in done
        return (B, stage + 1, m) in done or (I, stage + 1, m) in done

    left = [list(program) for program in plan.programs]
    while any(left):
        moved = False
        for program in left:
            while program and can_run(program[0]):
                done.add(program.pop(0))
                moved = True
        if not moved:
            return False
    return True


def one_queue_per_pair(rank_of_stage, order, vocabulary=False):
    """Return the queues of a transport that has one process group, to break rule 5."""
    if order == "tags":
        return queues_of(rank_of_stage, order, vocabulary)
    return {
        c: frozenset((rank_of_stage[c.source], rank_of_stage[c.target]))
        for c in channels(rank_of_stage, vocabulary)
    }


def with_w_last(plan: Plan) -> Plan:
    """Run all W of each rank at its end, in the opposite order of their I."""
    weight = Kind.BACKWARD_WEIGHT
    programs = (
        (*(s for s in p if s.kind is not weight), *(s for s in reversed(p) if s.kind is weight))
        for p in plan.programs
    )
    return replace(plan, programs=tuple(programs))


def queued_bytes(program: Program, kept: Sequence[float]) -> float:
    """Return the most that the queue of W of a rank holds during `program`."""
    held = most = 0.0
    for step in program:
        if step.kind is Kind.BACKWARD_INPUT:
            held += kept[step.stage]
        elif step.kind is Kind.BACKWARD_WEIGHT:
            held -= kept[step.stage]
        most = max(most, held)
    return most
