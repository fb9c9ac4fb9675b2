"""Simulation of a plan: start and end of each step, idle time and memory.

Each rank runs one step at a time, as early as its program and its inputs allow. A message takes
`costs.message` and does not occupy a rank. Two measures of time:

    makespan   from the first step of any rank to the end of the last; the time of a training step
               in which all ranks wait for the gradient norm
    span       the longest time of any rank from its own first step to its own last; the "cost" in
               the papers, and the measure for which "zero bubble" is claimed

Costs of the steps of a plan in time and memory, per stage.

Times have any one unit and memory any one unit: measured seconds and bytes, or multiples of the
cost of one micro-batch on one rank, as in the papers.

Times and memory of one plan under many cost models, faster than one simulation for each.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.fill_waits import Waits, fill_waits, filled_shares
from pipemega.pipeline.plan.instructions import VOCABULARY_PASSES, Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.lowering import execution_order


@dataclass(frozen=True)
class VocabularyCosts:
    """Costs of the passes of vocabulary parallelism for one micro-batch, equal on all ranks.

    Args:
        embed, embed_weight, output, loss, output_weight: times of E, G, S, C and T.
        kept: memory of a rank between S and T.

    Raises:
        ScheduleError: a cost is negative or not finite.
    """

    embed: float = 0.0
    embed_weight: float = 0.0
    output: float = 0.0
    loss: float = 0.0
    output_weight: float = 0.0
    kept: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(f"vocabulary.{field.name}", getattr(self, field.name))

    def scaled(self, factor: float) -> "VocabularyCosts":
        """Return the same memory with all times multiplied by `factor`."""
        times = {f.name: factor * getattr(self, f.name) for f in fields(self) if f.name != "kept"}
        return replace(self, **times)

    @property
    def times(self) -> Mapping[Kind, float]:
        times = (self.embed, self.embed_weight, self.output, self.loss, self.output_weight)
        return dict(zip(VOCABULARY_PASSES, times, strict=True))


def _check(name: str, cost: float) -> None:
    if not (math.isfinite(cost) and cost >= 0):
        raise ScheduleError(f"the cost {name} is {cost}: give a finite number, at least 0")


@dataclass(frozen=True)
class CostModel:
    """Times and memory of each stage for one micro-batch.

    Args:
        forward: time of F, per stage.
        backward_input: time of I, per stage.
        backward_weight: time of W, per stage.
        backward: time of B, per stage; None: the sum of I and W.
        activation: memory from the start of F to the end of B or W, per stage; None: 1 each.
        kept: memory between I and W, per stage; None: the same as `activation`. It can be higher:
            with activation checkpointing, I recomputes what F released.
        message: time from the end of a step to the start of the step on another rank that uses its
            result; 0 between steps of the same rank.
        vocabulary: costs of the passes of vocabulary parallelism, if the plan has them.
        waits: the exchanges of each stage, if parts of W run within them.

    Raises:
        ScheduleError: a cost is negative or not finite, or the numbers of stages differ.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    activation: tuple[float, ...] | None = None
    kept: tuple[float, ...] | None = None
    message: float = 0.0
    vocabulary: VocabularyCosts = VocabularyCosts()
    waits: tuple[Waits, ...] | None = None

    def __post_init__(self) -> None:
        _check("message", self.message)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "waits":
                continue
            for stage, cost in enumerate(value if isinstance(value, tuple) else ()):
                _check(f"{field.name} of stage {stage}", cost)
            if isinstance(value, tuple) and len(value) != len(self.forward):
                raise ScheduleError(
                    f"the costs have {len(self.forward)} stages for forward and {len(value)} for "
                    f"{field.name}: give the same number"
                )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        backward: float | None = None,
        kept: float | None = None,
        message: float = 0.0,
    ) -> "CostModel":
        """Return the same costs for every stage; the unit of memory is its `activation`."""
        return cls(
            (forward,) * num_stages,
            (backward_input,) * num_stages,
            (backward_weight,) * num_stages,
            None if backward is None else (backward,) * num_stages,
            (1.0,) * num_stages,
            None if kept is None else (kept,) * num_stages,
            message,
        )

    @classmethod
    def from_rank_costs(
        cls,
        rank_of_stage: Sequence[int],
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
    ) -> "CostModel":
        """Return costs for a rank whose stages together have the given times.

        The work of a rank is divided evenly among its stages, so schedules with different numbers
        of chunks compare directly. Memory is 1 unit per micro-batch and rank.
        """
        stages_on = Counter(rank_of_stage)
        share = [1.0 / stages_on[rank] for rank in rank_of_stage]
        return cls(
            tuple(forward * part for part in share),
            tuple(backward_input * part for part in share),
            tuple(backward_weight * part for part in share),
            activation=tuple(share),
            message=message,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def held_after_forward(self) -> tuple[float, ...]:
        """Memory between F and backward, per stage."""
        return self.activation if self.activation is not None else (1.0,) * self.num_stages

    @property
    def held_after_input(self) -> tuple[float, ...]:
        """Memory between I and W, per stage."""
        return self.kept if self.kept is not None else self.held_after_forward

    @property
    def whole_backward(self) -> tuple[float, ...]:
        """Time of B, per stage."""
        if self.backward is not None:
            return self.backward
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))

    @property
    def times(self) -> Mapping[Kind, tuple[float, ...]]:
        """Times of F, B, I and W, per stage."""
        times = (self.forward, self.whole_backward, self.backward_input, self.backward_weight)
        return dict(zip(_KINDS, times, strict=True))


Times = tuple[tuple[float, ...], ...]


class MemorySpan(NamedTuple):
    """Memory of a rank while a step runs, and from its end to the next step."""

    during: float
    after: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of each step, simulated or measured.

    Args:
        plan: compute steps only.
        start, end: start[r][i] and end[r][i] are the times of step i of rank r.
        peak: the highest memory of each rank, in units of the costs.
    """

    plan: Plan
    start: Times
    end: Times
    peak: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(row[-1] for row in self.end if row) - min(row[0] for row in self.start if row)

    @property
    def span(self) -> float:
        rows = zip(self.start, self.end, strict=True)
        return max(end[-1] - start[0] for start, end in rows if end)

    def busy(self, rank: int) -> float:
        """Return the compute time of `rank`."""
        return sum(self.end[rank]) - sum(self.start[rank])

    def bubble_of(self, rank: int) -> float:
        """Return the fraction of the makespan in which `rank` is idle, 0 to 1."""
        # Rounding can make the busy time larger than the makespan.
        return max(0.0, 1.0 - self.busy(rank) / self.makespan) if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """The fraction of the makespan in which ranks are idle, averaged over ranks."""
        return sum(map(self.bubble_of, range(self.plan.num_ranks))) / self.plan.num_ranks

    def steps(self, rank: int) -> Iterator[tuple[Instruction, float, float]]:
        """Yield (step, start, end) of `rank`, in order."""
        return zip(self.plan.programs[rank], self.start[rank], self.end[rank], strict=True)

    def waits(self, rank: int) -> list[tuple[Instruction, float]]:
        """Return the steps before which `rank` is idle, and for how long; the first from time 0."""
        ends = (0.0, *self.end[rank])
        gaps = zip(self.plan.programs[rank], self.start[rank], ends, strict=False)
        return [(step, start - before) for step, start, before in gaps if start > before]


def simulate(plan: Plan, costs: CostModel) -> Timeline:
    """Compute the times of the compute steps of `plan`, in time proportional to their number.

    Raises:
        ScheduleError: the costs have another number of stages, or the plan deadlocks.
    """
    plan = plan.compute_only()
    if costs.num_stages != plan.num_stages:
        raise ScheduleError(
            f"schedule {plan.name!r} has {plan.num_stages} stages, but the costs have "
            f"{costs.num_stages}"
        )
    time, passes = costs.times, costs.vocabulary.times
    clock = [0.0] * plan.num_ranks
    done: dict[Instruction, float] = {}
    shares = _shares_in_waits(plan, costs)
    start: list[list[float]] = [[] for _ in plan.programs]
    end: list[list[float]] = [[] for _ in plan.programs]
    for rank, step, needs in execution_order(plan):
        at = clock[rank]
        for need in needs:
            ready = done[need]
            if plan.rank_of(need) != rank:
                ready += costs.message
            if ready > at:
                at = ready
        start[rank].append(at)
        of_stage = time.get(step.kind)
        duration = passes[step.kind] if of_stage is None else of_stage[step.stage]
        if step in shares:
            duration *= 1 - shares[step]
        clock[rank] = done[step] = at + duration
        end[rank].append(clock[rank])
    return Timeline(
        plan,
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        tuple(peak_held(program, costs, plan.forward_only) for program in plan.programs),
    )


def _shares_in_waits(plan: Plan, costs: CostModel) -> dict[Instruction, float]:
    """Return the share of each W that runs within exchanges."""
    if costs.waits is None:
        return {}
    waits = dict(enumerate(costs.waits))
    by_rank = (filled_shares(fill_waits(program, waits)) for program in plan.programs)
    return {step: share for shares in by_rank for step, share in shares.items()}


def peak_held(program: Program, costs: CostModel, forward_only: bool = False) -> float:
    """Return the highest memory of a rank that runs `program`, in units of the costs.

    Activations count from the start of F to the end of W or B, with the memory `costs.kept` between
    I and W. With vocabulary parallelism S holds `costs.vocabulary.kept` until T. An evaluation
    holds only the current micro-batch.
    """
    return max((span.during for span in memory_spans(program, costs, forward_only)), default=0.0)


def memory_spans(program: Program, costs: CostModel, forward_only: bool) -> Iterator[MemorySpan]:
    """Yield the memory of a rank for each of its steps, by the rules of `peak_held`.

    A step allocates at its start and frees at its end.
    """
    activation, kept = costs.held_after_forward, costs.held_after_input
    held = 0.0
    for kind, stage, _ in program:
        during = after = held
        if kind is Kind.FORWARD:
            during += activation[stage]
            after = held if forward_only else during
        elif kind is Kind.BACKWARD_INPUT:
            after += kept[stage] - activation[stage]
            during = max(held, after)
        elif kind is Kind.BACKWARD:
            after -= activation[stage]
        elif kind is Kind.BACKWARD_WEIGHT:
            after -= kept[stage]
        elif kind is Kind.OUTPUT:
            during += costs.vocabulary.kept
            after = held if forward_only else during
        elif kind is Kind.OUTPUT_WEIGHT:
            after -= costs.vocabulary.kept
        yield MemorySpan(during, after)
        held = after


_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class CostReplay:
    """A plan whose order of execution and states of memory are computed once.

    The results are equal to the results of `simulate`.

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
        times = list(costs.times.values())
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

    A state has two numbers for each stage: how many micro-batches are between F and B or I, and
    how many are between I and W. An evaluation holds only the current micro-batch.
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
