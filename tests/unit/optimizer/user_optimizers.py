"""Optimizers as users write them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, arXiv:2302.06675; counts its steps as a Python number."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "count": 0}
                state["count"] += 1
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(self.direction(average.lerp(p.grad, 1 - beta1)), alpha=group["lr"])
                average.lerp_(p.grad, 1 - beta2)

    def direction(self, average: Tensor) -> Tensor:
        return average.sign()


class SmoothLion(Lion):
    """Without the jump at 0: a gradient that is 0 but for rounding has no sign."""

    def direction(self, average: Tensor) -> Tensor:
        return average / (average.abs() + 1e-4)


class Corrected(Optimizer):
    """A mean of gradients with its bias corrected; all its state has another form.

    The number of steps is a Python number, the recent steps are a list, and the sum of the learning
    rates is in the group.
    """

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.7) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.zeros_like(p), "count": 0, "recent": [], "note": None}
                state["count"] += 1
                state["recent"] = [*state["recent"][-2:], 1.0 / state["count"]]
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                scale = sum(state["recent"]) / (1 - group["beta"] ** state["count"])
                p.sub_(state["mean"], alpha=scale * group["lr"] / (1 + group["total"]))


class Factored(Optimizer):
    """Scales the update by means over rows, which it keeps in a list, and over columns."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square().view(p.shape[0] if p.dim() else 1, -1)
                rows, columns = square.mean(1), square.mean(0)
                state = self.state[p]
                if not state:
                    state |= {"rows": [torch.zeros_like(rows)], "cols": torch.zeros_like(columns)}
                state["rows"][0] += rows
                state["cols"] += columns
                scale = (state["rows"][0][:, None] * state["cols"]).sqrt().add_(1e-3)
                p.sub_(p.grad.view(square.shape).div(scale).view(p.shape), alpha=group["lr"])


class Shampoo(Optimizer):
    """Keeps a square matrix for each dim; counts all steps under a key that is no parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        counted: Any = self.state
        counted["steps"] = counted.get("steps", torch.zeros(1)) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state, update = self.state[p], p.grad
                for dim in range(p.dim()):
                    rows = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
                    matrix = state.setdefault(f"matrix_{dim}", torch.eye(len(rows)).to(rows))
                    matrix += rows @ rows.T
                    inverse = torch.linalg.inv(matrix)
                    update = (inverse @ update.movedim(dim, 0).flatten(1)).view(
                        update.movedim(dim, 0).shape
                    ).movedim(0, dim) if p.dim() > 1 else inverse @ update  # fmt: skip
                p.sub_(update, alpha=group["lr"] / float(counted["steps"]))


class GlobalNorm(Optimizer):
    """SGD with the norm of all gradients as the unit."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class Stochastic(Optimizer):
    """SGD with noise: no two runs are equal."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * torch.rand_like(p), alpha=group["lr"])


class OnlyFp32(torch.optim.SGD):
    """As kernels that have no fp64."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        assert all(isinstance(g, Tensor) and g.dtype == torch.float32 for g in gradients)
        return super().step(closure)


class ParameterFree(Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"beta": 0.9})
