"""Colossal-AI's way to ask for a zero-bubble schedule, for whoever comes from there."""

import math
from dataclasses import dataclass

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.synthesis import Layout, synthesize


@dataclass(frozen=True)
class PipelineGraph:
    """The costs of a model whose stages lie in a v, two on each rank, under Colossal-AI's names.

        plan = PipelineGraph(4, 8, f_cost=1, b_cost=1, w_cost=1, c_cost=0.1,
                             f_mem=2, b_mem=-1, w_mem=-1).get_v_schedule()
        engine, *_ = pipemega.initialize(model, config, plan=plan)

    Args:
        n_stage: pipeline ranks.
        n_micro: micro-batches.
        f_cost, b_cost, w_cost: times of F, I and W of one chunk, half of a rank.
        c_cost: time of a message between ranks.
        f_mem, b_mem, w_mem: what F, I and W of one chunk add to the memory of the rank; F takes it
            and the other two give it back, so that the three come to 0.
        max_mem: what a rank may hold; None: that of `n_stage` micro-batches, as 1F1B.

    Raises:
        ScheduleError: a cost is negative or no number, or the memory does not come to 0.
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
                f"{self.b_mem:g} + {self.w_mem:g} = {rest:g}: what F takes, B and W give back, as "
                "negative numbers"
            )
        if self.w_mem > 0 or self.f_mem < 0:
            raise ScheduleError(
                f"f_mem of a PipelineGraph is taken and w_mem given back: {self.f_mem:g} must not "
                f"be negative, and {self.w_mem:g} not positive"
            )

    @property
    def costs(self) -> CostModel:
        """The same in our words, stage by stage."""
        return CostModel.uniform(
            2 * self.n_stage,
            self.f_cost,
            self.b_cost,
            self.w_cost,
            activation=self.f_mem,
            kept=-self.w_mem,
            message=self.c_cost,
        )

    def get_v_schedule(self) -> Plan:
        """The best plan that is found within `max_mem`, by makespan; of compute steps, proven.

        Raises:
            ScheduleError: no plan keeps `max_mem`; says the least that would do.
        """
        limit = 2 * self.n_stage * self.f_mem if self.max_mem is None else self.max_mem
        return synthesize([Layout(v(self.n_stage), self.costs)], self.n_micro, limit).plan
