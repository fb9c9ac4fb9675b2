"""Vocabulary parallelism: adds the passes of the embedding and the output head to any plan.

Every pipeline rank holds an equal part of the rows of both weights (`plan.kinds`), so no stage has
more work than the others, however large the vocabulary is. Per micro-batch:

    E   rows of the embedding, on each rank, before F of the first stage
    S   softmax over the local rows of the head and its part of the gradient of hidden, on each
        rank, after F of the last stage
    C   combines the parts: the loss and the gradient of hidden, before B of the last stage
    T   gradient of the local rows of the head, on each rank, at any time after C
    G   gradient of the local rows of the embedding, at any time after B of the first stage

Between F and B of the last stage there is one exchange with all ranks, "Algorithm 2" of the paper.
While the last stage waits for it, it runs the next forward: all forwards move `shift` places ahead,
on every rank, as in the paper. Three ranks, three micro-batches, shift 1, without E and G:

    rank 0   F0 F1 F2 .. S0 .. S1 T0 B0 S2 T1 B1 T2 B2
    rank 1   .. F0 F1 F2 S0 .. S1 B0 T0 S2 B1 T1 T2 .. B2

Source: Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism",
arXiv:2411.05288. The paper adds the passes to the building block of a schedule; here a simulation
inserts them into any plan, under costs.
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.simulate import CostModel, simulate

# Places by which forwards may move ahead. The exchange takes one place, and one more if the other
# ranks are in the middle of a step when it begins.
_SHIFTS = (0, 1, 2)
_WORTH_A_SHIFT = 0.99
# E runs this many forwards of the first stage ahead: its message must have arrived by then.
_EMBED_AHEAD = 2
# T and G wait for an idle rank while fewer than this many are possible.
_MOST_PENDING = 2


def with_vocabulary(plan: Plan, costs: CostModel, memory_limit: float | None = None) -> Plan:
    """Return the compute steps of `plan` with the passes of vocabulary parallelism.

    The best of several shifts, in simulation. Each stage and each weight keeps the order of its
    micro-batches, so gradients are bitwise equal for every plan and all costs.

    Args:
        costs: costs of the steps and, as `costs.vocabulary`, of the passes.
        memory_limit: the limit of each rank, in the unit of the costs; without a shift it is not
            checked.
    """
    plan = plan.compute_only()
    if plan.num_ranks == 1:
        return plan
    best: tuple[float, Plan] | None = None
    for shift in _SHIFTS if not plan.forward_only else _SHIFTS[:1]:
        try:
            made = _Insertion(_shifted(plan, shift), costs).plan()
        except ScheduleError:
            if best is None:
                raise
            continue  # this plan has no room for more forwards ahead
        timeline = simulate(made, costs)
        over = memory_limit is not None and max(timeline.peak) > memory_limit
        # Each place costs the memory of a micro-batch.
        if best is None or (timeline.makespan < _WORTH_A_SHIFT * best[0] and not over):
            best = timeline.makespan, made
    assert best is not None
    return best[1]


def _shifted(plan: Plan, shift: int) -> Plan:
    """Move each forward ahead, to the place of the forward `shift` before it."""

    def moved(program: Program) -> Iterator[Instruction]:
        forwards = [step for step in program if step.kind is Kind.FORWARD]
        ahead, following = forwards[:shift], iter(forwards[shift:])
        first = True
        for step in program:
            if step.kind is not Kind.FORWARD:
                yield step
                continue
            if first:
                yield from ahead
                first = False
            yield from [each for each in [next(following, None)] if each is not None]

    return replace(plan, programs=tuple(tuple(moved(program)) for program in plan.programs))


class _Insertion:
    """Simulates a plan, and gives each rank in each idle moment the most urgent step or pass."""

    def __init__(self, base: Plan, costs: CostModel) -> None:
        self._base, self._costs = base, costs
        self._times = costs.vocabulary.times
        last = base.num_stages - 1
        first_forwards = self._order(Kind.FORWARD, 0)
        last_forwards = self._order(Kind.FORWARD, last)
        backwards = self._order(Kind.BACKWARD, 0, Kind.BACKWARD_INPUT)
        # The steps of each kind still to run on each rank, in reverse order.
        self._rest: list[dict[Kind | None, list[Instruction]]] = []
        for rank, program in enumerate(base.programs):
            orders = {
                Kind.LOSS: last_forwards if rank == base.rank_of_stage[last] else [],
                Kind.EMBED: first_forwards,
                Kind.OUTPUT: last_forwards,
                Kind.OUTPUT_WEIGHT: [] if base.forward_only else last_forwards,
                Kind.EMBED_WEIGHT: backwards,
            }
            rest: dict[Kind | None, list[Instruction]] = {None: list(reversed(program))}
            for kind, order in orders.items():
                place = last if kind is Kind.LOSS else rank
                rest[kind] = [Instruction(kind, place, m) for m in reversed(order)]
            self._rest.append(rest)
        everything = tuple(
            tuple(step for steps in rest.values() for step in steps) for rest in self._rest
        )
        self._all = replace(base, programs=everything)
        self._started_forwards: list[float] = []  # start times in the first stage
        self._end: dict[Instruction, float] = {}
        self._made: list[list[Instruction]] = [[] for _ in base.programs]

    def _order(self, kind: Kind, stage: int, other: Kind | None = None) -> list[int]:
        """Return the micro-batches of the steps of one stage, in the order of its rank."""
        program = self._base.programs[self._base.rank_of_stage[stage]]
        kinds = (kind, other)
        return [s.microbatch for s in program if s.stage == stage and s.kind in kinds]

    def plan(self) -> Plan:
        """Return the plan with the passes.

        Raises:
            ScheduleError: the base plan deadlocks.
        """
        events = [(0.0, rank) for rank in range(self._base.num_ranks)]
        free = [0.0] * self._base.num_ranks
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            step, wake = self._next(rank, now)
            if step is None:
                if wake is not None:
                    heappush(events, (wake, rank))
                continue
            free[rank] = end = now + self._duration(step)
            self._end[step] = end
            self._made[rank].append(step)
            if step.kind is Kind.FORWARD and step.stage == 0:
                self._started_forwards.append(now)
                # The next E is due on every rank.
                for other in range(self._base.num_ranks):
                    heappush(events, (now, other))
            for other in self._users(step, rank):
                heappush(events, (end if other == rank else end + self._costs.message, other))
        if any(steps for rest in self._rest for steps in rest.values()):
            raise ScheduleError(f"schedule {self._base.name!r} deadlocks with vocabulary passes")
        return replace(self._base, programs=tuple(map(tuple, self._made)))

    def _next(self, rank: int, now: float) -> tuple[Instruction | None, float | None]:
        """Return the step to run, removed from the rest; or None and when one becomes possible."""
        rest, wakes = self._rest[rank], []
        for kind in self._urgency(rank, now):
            steps = rest[kind]
            if not steps:
                continue
            ready = self._ready(steps[-1], rank)
            if ready is not None and ready <= now:
                return steps.pop(), None
            if ready is not None:
                wakes.append(ready)
        return None, min(wakes, default=None)

    def _urgency(self, rank: int, now: float) -> Iterator[Kind | None]:
        """Yield the kinds in the order in which they may run; None: the next step of the plan."""
        yield Kind.LOSS
        embeds = self._rest[rank][Kind.EMBED]
        total = self._base.num_microbatches
        if total - len(embeds) < len(self._started_forwards) + _EMBED_AHEAD:
            yield Kind.EMBED
        yield Kind.OUTPUT
        late = (Kind.OUTPUT_WEIGHT, Kind.EMBED_WEIGHT)
        for kind in late:
            pending = self._rest[rank][kind][-_MOST_PENDING:]
            if len(pending) == _MOST_PENDING:
                ready = self._ready(pending[0], rank)
                if ready is not None and ready <= now:
                    yield kind
        yield None
        yield from late

    def _ready(self, step: Instruction, rank: int) -> float | None:
        """Return when the results that `step` needs are on `rank`; None: not known yet."""
        ready = 0.0
        for need in self._all.all_needs(step):
            end = self._end.get(need)
            if end is None:
                return None
            ready = max(
                ready, end + (self._costs.message if self._all.rank_of(need) != rank else 0)
            )
        return ready

    def _duration(self, step: Instruction) -> float:
        costs, stage = self._costs, step.stage
        if step.kind is Kind.FORWARD:
            return costs.forward[stage]
        if step.kind is Kind.BACKWARD:
            return costs.whole_backward[stage]
        if step.kind is Kind.BACKWARD_INPUT:
            return costs.backward_input[stage]
        if step.kind is Kind.BACKWARD_WEIGHT:
            return costs.backward_weight[stage]
        return self._times[step.kind]

    def _users(self, step: Instruction, rank: int) -> set[int]:
        """Return the ranks whose next step may be possible after `step`."""
        kind, stage, ranks = step.kind, step.stage, self._base.rank_of_stage
        last = len(ranks) - 1
        everyone = set(range(self._base.num_ranks))
        if kind is Kind.LOSS or (kind is Kind.FORWARD and stage == last):
            return everyone
        if kind is Kind.FORWARD:
            return {rank, ranks[stage + 1]}
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            return everyone if stage == 0 else {rank, ranks[stage - 1]}
        if kind is Kind.EMBED:
            return {rank, ranks[0]}
        return {rank, ranks[last]} if kind is Kind.OUTPUT else {rank}
