"""Measured costs of stages, for schedule `auto`."""

from dataclasses import dataclass

from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.planning.prediction import Prediction
from pipemega.planning.schedule_choice import Stages

# Stages differ from the measured ones only if this part of a step is predicted to be saved: times
# vary by about as much, and those of the layers in other stages are known less well.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class MeasuredStages:
    """Measured costs of stages.

    Args:
        bounds, rank_of_stage: of the stages.
        split: I and W were measured, not only B.
        costs: in seconds and bytes.
        tried_others: a run had other stages too, and its steps were slower there.
    """

    bounds: Bounds
    rank_of_stage: tuple[int, ...]
    split: bool
    costs: CostModel
    tried_others: bool = False

    @property
    def stages(self) -> Stages:
        return Stages(self.bounds, self.rank_of_stage)


def is_worth_moving(best: Prediction, seconds: float) -> bool:
    """Return whether `best`, on other stages, is fast enough to leave the measured ones.

    Args:
        seconds: predicted for the best plan on the measured stages.
    """
    return best.timeline.makespan <= seconds * (1 - _LEAST_GAIN)


def stages_of(choice: Prediction) -> Stages:
    """Return the stages of a choice."""
    return Stages(choice.layout.bounds, choice.plan.rank_of_stage)


def split_was_measured(plan: Plan) -> bool:
    """Return whether a trace of `plan` has the times of I and W of each stage."""
    stages = {step.stage for step in plan.steps() if step.kind is Kind.BACKWARD_WEIGHT}
    return len(stages) == plan.num_stages
