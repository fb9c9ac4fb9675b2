"""PipelineGraph: the zero-bubble scheduler interface of Colossal-AI."""

import math
from dataclasses import dataclass, replace

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.pipeline.plan_selection import best_plan_on
from pipemega.pipeline.schedules.building_blocks import v


@dataclass(frozen=True)
class PipelineGraph:
    """The costs of a model with V placement, two stages per rank, with Colossal-AI's names.

        plan = PipelineGraph(4, 8, f_cost=1, b_cost=1, w_cost=1, c_cost=0.1,
                             f_mem=2, b_mem=-1, w_mem=-1).get_v_schedule()
        engine, *_ = pipemega.initialize(model, config, plan=plan)

    Args:
        n_stage: pipeline ranks.
        n_micro: micro-batches.
        f_cost, b_cost, w_cost: times of F, I and W of one chunk (half of a rank's layers).
        c_cost: time of a message between ranks.
        f_mem, b_mem, w_mem: change of the rank's memory by F, I and W of one chunk; F allocates
            it and the others free it, so their sum is 0.
        max_mem: memory limit of a rank; None: the memory of `n_stage` micro-batches, as in 1F1B.

    Raises:
        ScheduleError: a cost is negative or not a number, or the sum of the memory is not 0.
    """

    n_stage: int
    n_micro: int
    f_cost: float
    b_cost: float
    w_cost: float
    c_cost: float
    f_mem: float
    b_mem: float
    w_mem: float
    max_mem: float | None = None

    def __post_init__(self) -> None:
        rest = self.f_mem + self.b_mem + self.w_mem
        if not math.isclose(rest, 0.0, abs_tol=1e-6 * abs(self.f_mem)):
            raise ScheduleError(
                f"f_mem + b_mem + w_mem of a PipelineGraph must be 0, and {self.f_mem:g} + "
                f"{self.b_mem:g} + {self.w_mem:g} = {rest:g}: give the memory that B and W free as "
                "negative numbers"
            )
        if self.w_mem > 0 or self.f_mem < 0:
            raise ScheduleError(
                f"f_mem of a PipelineGraph ({self.f_mem:g}) must not be negative, and w_mem "
                f"({self.w_mem:g}) must not be positive"
            )

    @property
    def costs(self) -> CostModel:
        """The costs of each stage as a CostModel."""
        count, times = 2 * self.n_stage, (self.f_cost, self.b_cost, self.w_cost)
        costs = CostModel.uniform(count, *times, kept=-self.w_mem, message=self.c_cost)
        return replace(costs, activation=(self.f_mem,) * count)

    def get_v_schedule(self) -> Plan:
        """Return the plan with the shortest makespan found within `max_mem`; compute steps only.

        Raises:
            ScheduleError: no plan fits into `max_mem`; names the smallest limit that fits.
        """
        limit = 2 * self.n_stage * self.f_mem if self.max_mem is None else self.max_mem
        return best_plan_on(v(self.n_stage), self.costs, self.n_micro, limit)
