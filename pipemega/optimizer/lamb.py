"""LAMB for parameters that are sharded over tensor ranks, data ranks, or both."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pipemega.distributed.device_collectives import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.optimizer.grad_norm import square_sums
from pipemega.parameters import shard_of


class Lamb(torch.optim.Optimizer):
    """Adam with a step that is proportional to the norm of the parameter.

        u = m / (sqrt(v) + eps) + weight_decay w        m, v with Adam's bias correction
        w = w - lr clamp(|w| / |u|) u

    The norms are those of the *logical* parameter: with slices per data rank (ZeRO), squares are
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
