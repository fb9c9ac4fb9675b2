"""Times and memory of one plan under many cost models, faster than one simulation for each."""

from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.execution_order import execution_order
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.simulate import simulate

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class CostReplay:
    """A plan whose order of execution and states of memory are computed once.

    The results are those of `simulate`.

    Args:
        plan: compute steps only.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.steps = sum(map(len, plan.programs))
        self._is_simple = all(step.kind in _KINDS for step in plan.steps())
        if not self._is_simple:
            return
        number: dict[Instruction, int] = {}
        self._order: list[tuple[int, int, int, int, bool]] = []
        for rank, step, needs in execution_order(plan):
            number[step] = len(number)
            kind, needed, remote = _KINDS.index(step.kind), -1, False
            for need in needs:  # at most one
                needed, remote = number[need], plan.rank_of(need) != rank
            self._order.append((rank, kind, step.stage, needed, remote))
        self._states = [_states(program, plan.forward_only) for program in plan.programs]

    def makespan(self, costs: CostModel) -> float:
        """Return `simulate(plan, costs).makespan`."""
        if not self._is_simple:
            return simulate(self._plan, costs).makespan
        times = (costs.forward, costs.whole_backward, costs.backward_input, costs.backward_weight)
        message, clock = costs.message, [0.0] * self._plan.num_ranks
        ends: list[float] = []
        for rank, kind, stage, needed, remote in self._order:
            at = clock[rank]
            if needed >= 0:
                ready = ends[needed] + message if remote else ends[needed]
                if ready > at:
                    at = ready
            clock[rank] = end = at + times[kind][stage]
            ends.append(end)
        # The first step of the first stage starts at 0.
        return max(ends)

    def peak(self, costs: CostModel) -> float:
        """Return the highest memory of a rank: `max(simulate(plan, costs).peak)`."""
        if not self._is_simple:
            return max(simulate(self._plan, costs).peak)
        held, kept = costs.held_after_forward, costs.held_after_input
        peaks = []
        for stages, states in self._states:
            sizes = [size for stage in stages for size in (held[stage], kept[stage])]
            peaks.append(max(sum(map(float.__mul__, map(float, state), sizes)) for state in states))
        return max(peaks)


def _states(program: Program, forward_only: bool) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the stages of a rank, and the distinct states of its memory.

    A state has two numbers for each stage: of micro-batches between F and B or I, and of those
    between I and W. An evaluation holds only the current micro-batch.
    """
    stages = sorted({step.stage for step in program})
    place = {stage: 2 * index for index, stage in enumerate(stages)}
    now = [0] * (2 * len(stages))
    seen = {tuple(now)}
    for kind, stage, _ in program:
        at = place[stage]
        if kind is Kind.FORWARD:
            now[at] += 1
        elif kind is Kind.BACKWARD:
            now[at] -= 1
        elif kind is Kind.BACKWARD_INPUT:
            now[at] -= 1
            now[at + 1] += 1
        else:
            now[at + 1] -= 1
        seen.add(tuple(now))
        if forward_only:
            now[at] -= 1
    return stages, _largest(seen)


def _largest(states: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the states that no other state exceeds or equals in each number, if they are few."""
    if len(states) > 64:
        return list(states)
    return [
        state
        for state in states
        if not any(
            other != state and all(a >= b for a, b in zip(other, state, strict=True))
            for other in states
        )
    ]
