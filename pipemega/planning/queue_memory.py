"""`pipeline.weight_queue_limit: "auto"`: bounds what queued W add to the memory of a rank.

A schedule with split backward is compared with the same schedule with full backwards, as 1F1B is
to zb-h1, and with 1F1B on the same stages: a schedule that needs less than that may use the rest
for W. From I to W a linear keeps its input and the gradient of its output; a B frees both at
once. In a transformer this is as much as F keeps, in a chain of linears twice as much, and with
recomputation, where F keeps almost nothing, many times as much.

A rank runs queued W before the instruction that would exceed its limit; if one I alone exceeds it,
a B replaces I and W.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.weight_queue import limit_weight_queue
from pipemega.pipeline.plan_selection import measurement_plan
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.planning.memory_timeline import MemoryTimeline, peak_memory
from pipemega.profiling.meta_costs import StageCosts
from pipemega.profiling.meta_kernels import DeviceType

# Most memory of a rank, relative to the fullest rank of those two: without weights, gradients and
# optimizer state,
_ACTIVATIONS = 1.4
# and with them, if layers are recomputed: activations are then a small part of the memory.
_WHOLE_IF_RECOMPUTED = 1.2
# A chain of linears keeps twice as many bytes for W as for B; more is due to recomputation.
RECOMPUTED_RATIO = 2.25


def may_limit(plan: Plan, limit: float | str | None) -> bool:
    """Return whether the `pipeline.weight_queue_limit` of a config may change `plan`.

    "auto" changes only named schedules: a user's plan stays as it is, and the choice of schedule
    `auto` keeps `pipeline.memory_limit`. With `pipeline.vocabulary` "parallel" nothing changes: the
    passes of the vocabulary have their own places between I and W.
    """
    if limit is None:
        return False
    if limit == "auto" and (plan.name not in SCHEDULES or plan.has_vocabulary):
        return False
    return plan.splits_backward


def recomputes(costs: Sequence[StageCosts]) -> bool:
    """Return whether I recomputes much of what W needs."""
    return sum(c.kept for c in costs) > RECOMPUTED_RATIO * sum(c.held for c in costs)


def fit_weight_queue(
    plan: Plan, costs: Sequence[StageCosts], static: Sequence[int], device: DeviceType
) -> Plan:
    """Return the compute steps of `plan` with W so early that each rank stays within its limit.

    Args:
        costs: of every stage, with split backward.
        static: for each rank, bytes that do not depend on the plan.
    """
    whole_plans = _with_full_backwards(plan)
    peaks = [
        max(peak_memory(whole, rank, costs, device).total for whole in whole_plans)
        for rank in range(plan.num_ranks)
    ]
    most = [_ACTIVATIONS * max(peaks)] * plan.num_ranks
    if recomputes(costs):
        total = _WHOLE_IF_RECOMPUTED * max(map(sum, zip(peaks, static, strict=True)))
        most = [max(limit, total - known) for limit, known in zip(most, static, strict=True)]
    lowered = lower(plan)
    programs = tuple(
        _Fitting(lowered, rank, costs, device, limit).program() for rank, limit in enumerate(most)
    )
    return replace(plan.compute_only(), programs=programs)


def _with_full_backwards(plan: Plan) -> list[Plan]:
    """Return `plan`, and 1F1B if it has the same stages, lowered and without I and W."""
    sizes = plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks
    plain = measurement_plan(*sizes)
    plans = [plan, *([plain] if plain.rank_of_stage == plan.rank_of_stage else [])]
    return [lower(limit_weight_queue(each, [1.0] * plan.num_stages, 0.0)) for each in plans]


def fit_queue_of_linears(plan: Plan, device: DeviceType) -> Plan:
    """Return the compute steps of `plan` for a chain of linears whose sizes are unknown.

    I keeps twice as much as F, whatever the sizes are; stages are taken as equal.
    """
    zero = (0, 0, 0)
    costs = StageCosts(
        input=0, held=1000, output=0, message=0, gradient_in=0, gradient_out=0, kept=2000,
        working=zero, flops=zero, kernels=zero, seconds=zero, layer_flops=(),
    )  # fmt: skip
    return fit_weight_queue(plan, [costs] * plan.num_stages, [0] * plan.num_ranks, device)


class _Fitting:
    """Brings W forward in the program of one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        costs: Sequence[StageCosts],
        device: DeviceType,
        most: float,
    ) -> None:
        self._steps, self._most = plan.programs[rank], most
        self._memory = MemoryTimeline(plan.rank_of_stage, rank, costs, device)
        self._queue: deque[Instruction] = deque()
        self._program: list[Instruction] = []

    def program(self) -> Program:
        """Return the compute steps."""
        for step in self._steps:
            if step.kind is Kind.BACKWARD_WEIGHT:
                if step in self._queue:
                    self._queue.remove(step)
                    self._run(step)
                continue
            while self._queue and self._memory.peak_of(step) > self._most:
                self._run(self._queue.popleft())
            if step.kind is Kind.BACKWARD_INPUT:
                if self._memory.peak_of(step) > self._most:
                    step = step._replace(kind=Kind.BACKWARD)
                else:
                    self._queue.append(step._replace(kind=Kind.BACKWARD_WEIGHT))
            self._run(step)
        return tuple(self._program)

    def _run(self, step: Instruction) -> None:
        self._memory.run(step)
        if not step.kind.is_message:
            self._program.append(step)
