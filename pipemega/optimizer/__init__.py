"""The optimizer step: from the gradients of a batch to updated parameters.

step, step_outcome               the step; the decision to skip or clip
gradients, grad_layout, buckets  gradient buffers and their reductions; their layout
master_params, zero              what the optimizer updates: whole parameters, or ZeRO slices
grad_ready, zero_comm            communication of ZeRO, during the backward pass if possible
mixed_precision                  dtypes and loss scaling
build_step, build_optimizer, lamb, param_groups, lr_schedules, lr_formulas
user_optimizer, cut_test, torch_schedule         the optimizer and scheduler of a user
state_by_name, plain_values
post_validate, backup            the step that does not wait for the gradient norm
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
