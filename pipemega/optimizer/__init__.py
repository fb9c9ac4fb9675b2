"""From gradients to the next parameters: the step, its optimizers, its learning rates."""

from pipemega.optimizer.build import build_optimizer, parameter_groups
from pipemega.optimizer.decision import StepReport
from pipemega.optimizer.lamb import Lamb
from pipemega.optimizer.lr_schedules import SCHEDULES, LRSchedule, build_schedule
from pipemega.optimizer.post_validate import PostValidatedStep
from pipemega.optimizer.step import OptimizerStep
from pipemega.optimizer.targets import Targets
from pipemega.optimizer.zero import ZeroTargets

__all__ = [
    "SCHEDULES",
    "LRSchedule",
    "Lamb",
    "OptimizerStep",
    "PostValidatedStep",
    "StepReport",
    "Targets",
    "ZeroTargets",
    "build_optimizer",
    "build_schedule",
    "parameter_groups",
]
