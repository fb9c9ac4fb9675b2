"""Layers whose backward must not be split as usual, beside plain torch in one process (fp64)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from pipemega import PipelineModule, initialize
from pipemega.errors import PipemegaError
from tests.ranks.pipeline.message_kinds import REFUSED, RIGHT

WIDTH, STEPS = 4, 3


class Saliency(nn.Module):
    """Scales by the gradient of its own output with respect to its input."""

    def __init__(self, *, ask: str = "input") -> None:
        super().__init__()
        self.linear, self._ask = nn.Linear(WIDTH, WIDTH), ask

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        wanted = z if self._ask == "input" else self.linear.weight
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.linear(z).tanh().sum(), wanted)
        scale = gradient.tanh() if self._ask == "input" else gradient.sum().tanh()
        y: Tensor = self.linear(x) * scale
        return y


class Penalty(nn.Module):
    """Adds the norm of an input gradient that is itself differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        with torch.enable_grad():
            output = self.linear(z).tanh().sum()
            (gradient,) = torch.autograd.grad(output, z, create_graph=True)
        y: Tensor = self.linear(x) + gradient.square().sum().tanh()
        return y


class WholePenalty(Penalty):
    split_backward = False


class _Implicit(torch.autograd.Function):
    """Identity on y whose backward runs the backward of a function of its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, linear: nn.Module) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.linear(z), z, gradients[0])
        return gradients[0] + 0.1 * found, None


class Implicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Implicit.apply(self.linear(x), self.linear)  # type: ignore[no-untyped-call]
        return y


class InnerBackward(nn.Module):
    """Accumulates a gradient of its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.enable_grad():
                self.linear(x.detach()).square().mean().backward()
        y: Tensor = self.linear(x)
        return y


class Named(nn.Module):
    """Has the names that layers of pipemega have for their products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.weight_sink, self.sequence_parallel = None, True

    def product(self, x: Tensor, factor: float) -> Tensor:
        return x @ self.weight * factor

    lookup = grouped_product = gathered_product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, 2.0) + self.lookup(x, 3.0)


class Transformed(nn.Module):
    """Calls its linear under vmap, torch.func.grad and functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.func.vmap(self.linear)(x)
        slope = torch.func.grad(lambda z: self.linear(z).sum())(x)
        doubled = {"weight": self.linear.weight * 2, "bias": self.linear.bias}
        return y + slope + torch.func.functional_call(self.linear, doubled, (x,))


class Twice(nn.Module):
    """Uses one weight three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _changed(change: Callable[[nn.Linear], object]) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    change(linear)
    return linear


def _replace_forward(linear: nn.Linear) -> None:
    before = linear.forward
    linear.forward = lambda x: 2 * before(x).tanh()  # type: ignore[method-assign]


def _prune(linear: nn.Linear) -> None:
    mask = torch.eye(WIDTH) + 0.5
    prune.custom_from_mask(linear, "weight", mask)


LAYERS: Mapping[str, Callable[[], Any]] = {
    "saliency": Saliency,
    "own weight": lambda: Saliency(ask="weight"),
    "penalty": Penalty,
    "whole penalty": WholePenalty,
    "implicit": Implicit,
    "inner backward": InnerBackward,
    "names": Named,
    "transforms": Transformed,
    "replaced forward": lambda: _changed(_replace_forward),
    "hook after": lambda: _changed(
        lambda linear: linear.weight.register_post_accumulate_grad_hook(_halve)
    ),
    "hook": lambda: _changed(lambda linear: linear.weight.register_hook(lambda grad: grad * 0.5)),
    "spectral_norm": lambda: _changed(torch.nn.utils.spectral_norm),
    "prune": lambda: _changed(_prune),
    "twice": Twice,
    **RIGHT,
    **REFUSED,
}


def build(kind: str) -> list[Any]:
    torch.manual_seed(0)
    first, layers, last = nn.Linear(WIDTH, WIDTH), LAYERS[kind](), nn.Linear(WIDTH, WIDTH)
    return [first, torch.tanh, *(layers if isinstance(layers, list) else [layers]), last]


def data(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


def trained(kind: str, schedule: str, micro: int, **pipeline: Any) -> Any:
    """Return losses and parameters, or the error."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.0,
        "mesh": {"pipeline": dist.get_world_size() if dist.is_initialized() else 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "pipeline": {"schedule": schedule, **pipeline},
    }
    try:
        engine = initialize(PipelineModule(build(kind), F.mse_loss), config)[0]
        losses = [engine.train_batch(batch=data(step)) for step in range(STEPS)]
    except PipemegaError as error:
        return str(error)
    return losses, engine.parameter_state()


def expected(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = list(build(kind))
    named = {
        f"layers.{i}.{n}": p
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Module)
        for n, p in layer.named_parameters()
    }
    optimizer, losses = torch.optim.SGD(named.values(), lr=0.05), []
    for step in range(STEPS):
        h, y = data(step)
        optimizer.zero_grad()
        for layer in model:
            h = layer(h)
        loss = F.mse_loss(h, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in named.items()}


def compared(
    kinds: list[str], schedule: str, pipeline: Mapping[str, Any] | None = None, micro: int = 4
) -> dict[str, Any]:
    """Return the distance from plain torch of each kind of layer, or its error."""
    torch.set_default_dtype(torch.float64)
    try:
        found = {}
        for kind in kinds:
            result = trained(kind, schedule, micro, **(pipeline or {}))
            if isinstance(result, str):
                found[kind] = result
                continue
            losses, state = expected(kind)
            pairs = [*zip(result[0], losses, strict=True)]
            distances = [abs(a - b) for a, b in pairs]
            distances += [float((result[1][n] - state[n]).abs().max()) for n in state]
            found[kind] = max(distances)
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def bits(kind: str, schedules: list[str]) -> list[Any]:
    """Return losses and parameters in fp32 under each schedule."""
    return [trained(kind, schedule, 1) for schedule in schedules]
