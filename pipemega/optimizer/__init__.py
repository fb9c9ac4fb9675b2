"""The optimizer step: from the gradients of a batch to updated parameters.

step, step_outcome    the step; the decision to skip or clip
post_validation       the step that does not wait for the gradient norm
gradients             gradient buffers, their layout and reductions
masters, zero         what the optimizer updates: whole parameters, or ZeRO slices
mixed_precision       dtypes and loss scaling
build_step            the step of a config; optimizers: torch's, fused, LAMB
param_groups          groups, and states by logical name
user_optimizer        the optimizer of a user; lr_schedules: schedules, also the user's own
"""

from pipemega.optimizer.lr_schedules import LRSchedule, build_schedule
from pipemega.optimizer.masters import MasterParams, ModelParams, PlainMasterParams
from pipemega.optimizer.optimizers import Lamb, build_optimizer
from pipemega.optimizer.param_groups import parameter_groups
from pipemega.optimizer.post_validation import PostValidatedStep
from pipemega.optimizer.step import OptimizerStep, StepSettings
from pipemega.optimizer.step_outcome import StepReport
from pipemega.optimizer.zero import ZeroMasterParams

__all__ = [
    "LRSchedule",
    "Lamb",
    "MasterParams",
    "ModelParams",
    "OptimizerStep",
    "PlainMasterParams",
    "PostValidatedStep",
    "StepReport",
    "StepSettings",
    "ZeroMasterParams",
    "build_optimizer",
    "build_schedule",
    "parameter_groups",
]
