"""From the name and parameters of the config to a torch optimizer on the right kernel."""

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipemega.config.nearest import did_you_mean
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.mesh import Axis
from pipemega.optimizer.lamb import Lamb
from pipemega.parameters import shard_of

# Any: each class has a constructor of its own.
OptimizerClass = type[Any]

_log = logging.getLogger(__name__)

# What DeepSpeed's Adam takes beyond torch's.
_ADAM_KEYS = {"torch_adam", "adam_w_mode", "bias_correction"}
_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# Each element by itself, so that a cut parameter is stepped as the whole would be.
_ELEMENTWISE = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
}  # fmt: skip
_REFUSED = {
    "LBFGS": "it evaluates the model several times a step, which a pipeline cannot offer it",
    "SparseAdam": "it takes sparse gradients only, and gradients here are dense",
}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, decay_norms_and_biases: bool = True
) -> list[dict[str, Any]]:
    """Groups for an optimizer: all in one, or those without weight decay apart.

    Norms and biases are told by being logically one-dimensional.  Each rank gets the same number
    of groups, empty ones too.
    """
    parameters = [parameter for _, parameter in named_parameters]
    if decay_norms_and_biases:
        return [{"params": parameters}]
    flat = [len(shard_of(parameter).shape) <= 1 for parameter in parameters]
    return [
        {"params": [p for p, is_flat in zip(parameters, flat, strict=True) if not is_flat]},
        {
            "params": [p for p, is_flat in zip(parameters, flat, strict=True) if is_flat],
            "weight_decay": 0.0,
        },
    ]


def build_optimizer(
    type_name: str,
    params: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    kernels: Kernels,
    tensor: Axis | None = None,
    data: Axis | None = None,
) -> Optimizer:
    """The optimizer that the config names.

    Adam and AdamW take DeepSpeed's keys and defaults (Adam decays like AdamW unless `adam_w_mode`
    is false, and weight decay is 0 by default), Lamb is `Lamb`, any other name is looked up in
    torch.optim.  Case does not matter.

    Args:
        type_name, params: `optimizer.type` and `.params`.
        groups: from `parameter_groups`.
        kernels: which implementation runs.
        tensor: the tensor axis of the mesh.
        data: the data axis, where its ranks hold slices of each parameter; else None.

    Raises:
        ConfigError: an unknown name or key, a value that the optimizer refuses, or an optimizer
            that does not work here.
    """
    tensor = tensor if tensor is not None else Axis("tensor")
    known = _known()
    name = _name_of(type_name, known, tensor, data)
    kind: OptimizerClass = known[name]
    # JSON has no tuples, and torch's optimizers compare with them.
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in params.items()}
    _check_keys(name, kind, arguments)
    tensors = [p for group in groups for p in group["params"]]
    if name in ("Adam", "AdamW"):
        kind, arguments = _adam(name, arguments, kernels, tensors)
    if name == "Lamb":
        arguments |= {"axis": tensor, "data": data}
    elif kind is not kernels.adam and not {"fused", "foreach"} & set(arguments):
        arguments |= kernels.optimizer_arguments(kind, tensors)
    try:
        optimizer: Optimizer = kind([dict(group) for group in groups], **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {name} refuses them: {error}") from error
    return optimizer


def _name_of(type_name: str, known: Iterable[str], tensor: Axis, data: Axis | None) -> str:
    """The optimizer's own name, of one that works on parameters cut as they are here."""
    name = {n.lower(): n for n in known}.get(type_name.lower())
    if name is None:
        raise ConfigError(f"unknown optimizer.type '{type_name}'{did_you_mean(type_name, known)}")
    if name in _REFUSED:
        raise ConfigError(f"optimizer.type '{name}' does not work here: {_REFUSED[name]}")
    if name in _ELEMENTWISE | {"Lamb"}:
        return name
    others = f"{', '.join(sorted(_ELEMENTWISE))}, Lamb"
    if tensor.size > 1:
        raise ConfigError(
            f"optimizer.type '{name}' works on whole matrices, and mesh.tensor ({tensor.size}) "
            f"cuts them: set mesh.tensor to 1, or take one of {others}"
        )
    if data is not None:
        raise ConfigError(
            f"optimizer.type '{name}' works on whole matrices, and zero_optimization.stage 1 cuts "
            f"them over {data.size} data ranks: set zero_optimization.stage to 0, or take one of "
            f"{others}"
        )
    return name


def _known() -> dict[str, OptimizerClass]:
    """Optimizers by name: torch's, and ours."""
    of_torch = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer)
    }
    of_torch.pop("Optimizer", None)
    return {**of_torch, "Lamb": Lamb}


def _check_keys(name: str, kind: OptimizerClass, arguments: Mapping[str, Any]) -> None:
    known = set(inspect.signature(kind).parameters) - {"params", "axis", "data"}
    if name in ("Adam", "AdamW"):
        known |= _ADAM_KEYS
    for key in arguments:
        if key == "max_grad_norm":
            raise ConfigError(
                "optimizer.params.max_grad_norm is not taken here: set gradient_clipping at the "
                "top level"
            )
        if key not in known:
            raise ConfigError(
                f"unknown key 'optimizer.params.{key}' of {name}{did_you_mean(key, known)}"
            )


def _adam(
    name: str, arguments: dict[str, Any], kernels: Kernels, tensors: Sequence[torch.Tensor]
) -> tuple[OptimizerClass, dict[str, Any]]:
    """The class for Adam or AdamW and its arguments, in the words of that class."""
    arguments = {**_ADAM_DEFAULTS, **arguments}
    torch_adam = arguments.pop("torch_adam", False)
    decoupled = arguments.pop("adam_w_mode", True) or name == "AdamW"
    corrected = arguments.pop("bias_correction", True)
    if name == "Adam" and decoupled and arguments["weight_decay"]:
        _log.info(
            "optimizer Adam decays weights like AdamW, as DeepSpeed's does; "
            "optimizer.params.adam_w_mode false adds the decay to the gradients"
        )
    plain = set(arguments) == set(_ADAM_DEFAULTS)
    if plain and not torch_adam and kernels.takes_apex_adam(tensors):
        assert kernels.adam is not None
        return kernels.adam, {
            **arguments, "adam_w_mode": decoupled, "bias_correction": corrected
        }  # fmt: skip
    if not corrected:
        raise ConfigError(
            "optimizer.params.bias_correction is false, which only NVIDIA apex's FusedAdam can do, "
            "and it is not in use: remove the key"
        )
    return torch.optim.AdamW if decoupled else torch.optim.Adam, arguments
