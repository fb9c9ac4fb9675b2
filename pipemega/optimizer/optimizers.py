"""Build the torch optimizer that the config names, with the fastest kernel that is installed.

LAMB for parameters that are sharded over tensor ranks, data ranks, or both.

torch's optimizers without torch._dynamo, which a run without `torch.compile` does not need.

torch.optim imports it in the constructor and in the step, only to keep `torch.compile` out of them:
0.3 s of every process at start-up.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipemega.config.sections.optimizer_section import PARAMS, AdamParams, OptimizerParams
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.distributed.torch_versions import too_old
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.optimizer.step_outcome import square_sums
from pipemega.parameters import shard_of


class Lamb(torch.optim.Optimizer):
    """Adam with a step that is proportional to the norm of the parameter.

        u = m / (sqrt(v) + eps) + weight_decay w        m, v with Adam's bias correction
        w = w - lr clamp(|w| / |u|) u

    The norms are norms of the *logical* parameter: with slices per data rank (ZeRO), squares are
    summed over the data ranks, and for parameters sharded over tensor ranks over these; each is
    one all-reduce for all parameters.  Replicas of tied parameters have equal weights and
    gradients, so they need no communication.  If the norm of w or u is 0, w changes by lr u.

    Args:
        params: parameters or groups, in the same order on all ranks of an axis; a slice may be
            empty.
        axis: the tensor axis of the mesh.
        data: the data axis if its ranks hold slices of each parameter (ZeRO); else None.
        max_coeff, min_coeff: bounds of |w| / |u|.

    Source: You et al. 2019, arXiv:1904.00962, algorithm 2; the bounds are DeepSpeed's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        axis: Axis | None = None,
        data: Axis | None = None,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr is {lr}: it must not be below 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {tuple(betas)}: each must be in [0, 1)")
        if not 0 < min_coeff <= max_coeff:
            raise ValueError(
                f"min_coeff ({min_coeff}) must be above 0 and not above max_coeff ({max_coeff})"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self._axis = axis if axis is not None else Axis("tensor")
        self._data = data if data is not None else Axis("data")
        self._sharded: tuple[list[int], Tensor] | None = None
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[tuple[dict[str, Any], Tensor, Tensor]] = [
            (group, parameter, self._direction(group, parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not updates:
            return loss
        ratios = self._trust_ratios([(w, u) for _, w, u in updates])
        for (group, parameter, update), ratio in zip(updates, ratios, strict=True):
            bounded = ratio.clamp(group["min_coeff"], group["max_coeff"])
            bounded = torch.where(ratio == 0, torch.ones_like(ratio), bounded)
            parameter.sub_(update.mul_((bounded * group["lr"]).to(update.dtype)))
        return loss

    def _direction(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Add this step's gradient to m and v; return u."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first = second = 1.0
        if group["bias_correction"]:
            steps = int(state["step"])
            first, second = 1 - beta1**steps, 1 - beta2**steps
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        update: Tensor = (state["exp_avg"] / first).div_(denominator)
        update.add_(parameter, alpha=group["weight_decay"])
        return update

    def _index_of_sharded(self, weights: list[Tensor]) -> Tensor:
        """Return the positions of the weights that are sharded over the tensor ranks."""
        numbers = [i for i, weight in enumerate(weights) if shard_of(weight).dim is not None]
        # Kept on the device: an index from a list is copied in each step.
        if self._sharded is None or self._sharded[0] != numbers:
            device = weights[0].device
            self._sharded = numbers, torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._sharded[1]

    def _trust_ratios(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return |w| / |u| of each logical parameter, 0 if |w| or |u| is 0: [parameters] fp64."""
        squares = square_sums([tensor for pair in pairs for tensor in pair])
        squares = squares.view(-1, 2)  # [parameters, (w, u)]
        if self._data.size > 1 and not squares.is_meta:
            squares = _sum_over(self._data, squares)
        if self._axis.size > 1 and not squares.is_meta:
            sharded = self._index_of_sharded([w for w, _ in pairs])
            if sharded.numel():
                squares[sharded] = _sum_over(self._axis, squares[sharded])
        weight, update = squares.sqrt().unbind(1)
        return torch.where(update > 0, weight / update, torch.zeros_like(update))


def _sum_over(axis: Axis, tensor: Tensor) -> Tensor:
    """Sum over the ranks of the axis."""
    all_reduce(tensor, axis)
    return tensor


# The attribute in which torch keeps the function that `torch._dynamo.disable` returned.
_DISABLED = "__dynamo_disable"


def build_eagerly(
    kind: type[Any], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Optimizer:
    """Return `kind(groups, **arguments)`, whose `step` does not import torch._dynamo either.

    The type, the hooks and the results do not differ from torch's.
    """
    with without_dynamo([getattr(Optimizer.add_param_group, "__wrapped__", None)]):
        optimizer: Optimizer = kind([dict(group) for group in groups], **arguments)
    if kind.__module__.startswith("torch.optim") and not optimizer.defaults.get("differentiable"):
        # As torch decorates it, without the graph breaks: they only matter in a compiled function.
        step = Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(kind.step)))
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@contextmanager
def without_dynamo(functions: Iterable[Any]) -> Iterator[None]:
    """Context in which functions run as they are, if torch._dynamo is not imported yet.

    Args:
        functions: functions that `torch._disable_dynamo` decorates; the iterable is read only if
            needed. None in it is skipped.
    """
    wanted = [] if "torch._dynamo" in sys.modules else functions
    eager = [f for f in wanted if f is not None and not hasattr(f, _DISABLED)]
    for function in eager:
        setattr(function, _DISABLED, function)
    try:
        yield
    finally:
        for function in eager:
            delattr(function, _DISABLED)


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
    expert: Axis | None = None,
    shard_axis: Axis | None = None,
) -> Optimizer:
    """Build the optimizer that the config names.

    Args:
        type_name, params: `optimizer.type` and `.params`, which `config.optimizer` has validated.
        groups: parameter groups.
        kernels: the fused kernels that may be used.
        tensor: the tensor axis, over which parameters may be sharded.
        expert: the expert axis, over which parameters may be sharded.
        shard_axis: the data axis, if its ranks hold slices of each parameter (ZeRO).

    Raises:
        ConfigError: the optimizer rejects its params, or cannot update sharded parameters, or this
            torch does not have it.
    """
    tensor = tensor if tensor is not None else Axis("tensor")
    if type_name in _MATRIX_OPTIMIZERS:
        _check_unsharded(type_name, tensor, expert, shard_axis)
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


def _check_unsharded(
    type_name: str, tensor: Axis, expert: Axis | None, shard_axis: Axis | None
) -> None:
    others = ", ".join(name for name in PARAMS if name not in _MATRIX_OPTIMIZERS)
    if tensor.size > 1:
        raise ConfigError(
            f"optimizer.type '{type_name}' needs whole matrices, and mesh.tensor ({tensor.size}) "
            f"shards them: set mesh.tensor to 1, or use one of {others}"
        )
    if expert is not None and expert.size > 1:
        raise ConfigError(
            f"optimizer.type '{type_name}' needs whole matrices, and mesh.expert ({expert.size}) "
            f"shards those of experts: set mesh.expert to 1, or use one of {others}"
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
    """Choose the class for Adam or AdamW; change `arguments` to the arguments of that class."""
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
