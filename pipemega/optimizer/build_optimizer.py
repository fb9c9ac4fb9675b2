"""Build the torch optimizer that the config names, with the fastest kernel that is installed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pipemega.config.optimizer import PARAMS, AdamParams, OptimizerParams
from pipemega.distributed.mesh import Axis
from pipemega.distributed.torch_versions import too_old
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.optimizer.eager_torch import build_eagerly
from pipemega.optimizer.lamb import Lamb

# Any: each class has another constructor.
OptimizerClass = type[Any]

# They need whole matrices; all others update each element separately, or reduce norms (Lamb).
_MATRIX_OPTIMIZERS = ("Adafactor", "Muon")


def build_optimizer(
    type_name: str,
    params: OptimizerParams,
    groups: Sequence[Mapping[str, Any]],
    *,
    kernels: Kernels,
    tensor: Axis | None = None,
    shard_axis: Axis | None = None,
) -> Optimizer:
    """Build the optimizer that the config names.

    Args:
        type_name, params: `optimizer.type` and `.params`, which `config.optimizer` has validated.
        groups: parameter groups.
        kernels: the fused kernels that may be used.
        tensor: the tensor axis, over which parameters may be sharded.
        shard_axis: the data axis, if its ranks hold slices of each parameter (ZeRO).

    Raises:
        ConfigError: the optimizer rejects its params, or cannot update sharded parameters, or this
            torch does not have it.
    """
    tensor = tensor if tensor is not None else Axis("tensor")
    if type_name in _MATRIX_OPTIMIZERS:
        _check_unsharded(type_name, tensor, shard_axis)
    tensors = [p for group in groups for p in group["params"]]
    arguments = params.arguments()
    kind: OptimizerClass
    if isinstance(params, AdamParams):
        kind = _adam(type_name, params, arguments, kernels, tensors)
    elif type_name == "Lamb":
        kind = Lamb
        arguments |= {"axis": tensor, "data": shard_axis}
    else:
        if not hasattr(torch.optim, type_name):
            raise too_old(f"optimizer.type '{type_name}'")
        kind = getattr(torch.optim, type_name)
    chosen_by_user = {"fused", "foreach"} & arguments.keys()
    if kind not in (kernels.adam, Lamb) and not chosen_by_user:
        arguments |= kernels.optimizer_arguments(kind, tensors)
    try:
        return build_eagerly(kind, groups, arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {type_name} rejects them: {error}") from error


def _check_unsharded(type_name: str, tensor: Axis, shard_axis: Axis | None) -> None:
    others = ", ".join(name for name in PARAMS if name not in _MATRIX_OPTIMIZERS)
    if tensor.size > 1:
        raise ConfigError(
            f"optimizer.type '{type_name}' needs whole matrices, and mesh.tensor ({tensor.size}) "
            f"shards them: set mesh.tensor to 1, or use one of {others}"
        )
    if shard_axis is not None:
        raise ConfigError(
            f"optimizer.type '{type_name}' needs whole matrices, and zero_optimization.stage 1 "
            f"shards them over {shard_axis.size} data ranks: set zero_optimization.stage to 0, or "
            f"use one of {others}"
        )


def _adam(
    type_name: str,
    params: AdamParams,
    arguments: dict[str, Any],
    kernels: Kernels,
    tensors: Sequence[torch.Tensor],
) -> OptimizerClass:
    """Choose the class for Adam or AdamW; change `arguments` to those of that class."""
    decoupled = params.adam_w_mode or type_name == "AdamW"
    for key in ("torch_adam", "adam_w_mode", "bias_correction"):
        del arguments[key]
    common = arguments.keys() == {"lr", "betas", "eps", "weight_decay"}
    if common and not params.torch_adam and kernels.takes_apex_adam(tensors):
        assert kernels.adam is not None
        arguments |= {"adam_w_mode": decoupled, "bias_correction": params.bias_correction}
        return kernels.adam
    if not params.bias_correction:
        raise ConfigError(
            "optimizer.params.bias_correction is false, which only NVIDIA apex's FusedAdam "
            "supports, and it is not in use: remove the key"
        )
    return torch.optim.AdamW if decoupled else torch.optim.Adam
