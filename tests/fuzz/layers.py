"""Kinds of layers for random models; all have fp64 numbers and [batch, 4, 4] -> [batch, 4, 4].

A kind is a list of layers, each a factory of a module, or a function that is itself the layer. The
layers of a kind with two of them have an unusual message between them.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.fuzz.experts import KINDS as EXPERTS
from tests.fuzz.experts import Mixture
from tests.ranks.pipeline import foreign_backward, message_kinds

WIDTH = 4


class Function(nn.Module):
    """Calls a function on the modules that it holds and the input."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self._function = nn.ModuleList(modules), function

    def forward(self, x: Any) -> Any:
        return self._function(*self.parts, x)


class Scaled(nn.Module):
    """Multiplies by one parameter: by elements, or as a matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_complex():
            return (x * self.weight).real
        return x @ self.weight if self.weight.dim() == 2 else x * self.weight


class Empty(nn.Module):
    """Has two parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, WIDTH))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is nothing to initialize
            self.linear = nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).sum() + self.weight.sum()


class Sometimes(nn.Module):
    """Uses one of its two linears: which of them depends on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        # Not the sum of x: after a norm it is 0 in theory, and rounding would decide.
        y: Tensor = (self.one if float(x.detach().flatten()[0]) > 0 else self.other)(x)
        return y


class ByMode(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.training else y * 0.5


class Parallel(nn.Module):
    """A column-parallel and a row-parallel linear."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, axis=axis)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, axis=axis)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x**2


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """Freeze the parameters of these names; all of them without names."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(bool(names) and name not in names)
    return module


def convolution(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    convs = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1, dilation=1)
    layers = nn.Sequential(*convs).to(memory_format=memory_format)
    return Function(lambda convs, x: convs(x[:, None])[:, 0], layers)


def weights() -> Tensor:
    return torch.linspace(-1.0, 1.0, 2 * WIDTH * WIDTH).reshape(WIDTH, 2 * WIDTH)


def with_hook(register: Callable[[nn.Linear], object]) -> nn.Linear:
    module = linear()
    register(module)
    return module


def pair(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> list[Any]:
    """Return two layers with a message between them."""
    return [
        partial(message_kinds.Source, pack),
        partial(message_kinds.Target, unpack),
    ]


def _double(_module: nn.Module, gradients: Any) -> Any:
    return tuple(2 * gradient for gradient in gradients)


LAYERS: dict[str, list[Any]] = {
    "linear": [linear],
    "linear without bias": [partial(linear, bias=False)],
    "tanh": [torch.tanh],
    "gelu": [nn.GELU],
    "norm": [partial(nn.LayerNorm, WIDTH)],
    "batch norm": [partial(nn.BatchNorm1d, WIDTH, track_running_stats=False)],
    "conv": [convolution],
    "conv channels_last": [partial(convolution, torch.channels_last)],
    "conv 1d": [partial(nn.Conv1d, WIDTH, WIDTH, 3, padding=1, groups=2)],
    "attention": [
        lambda: Function(
            lambda attention, x: attention(x, x, x, need_weights=False)[0],
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        )
    ],
    "gru": [lambda: Function(lambda gru, x: gru(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True))],
    "transposed": [lambda: Scaled(weights()[:, :WIDTH].contiguous().t())],
    "gaps": [lambda: Scaled(weights()[:, ::2])],
    "scalar": [lambda: Scaled(torch.tensor(1.5))],
    "complex": [lambda: Scaled(torch.ones(WIDTH, dtype=torch.complex128))],
    "empty": [Empty],
    "frozen linear": [lambda: frozen(linear())],
    "frozen weight": [lambda: frozen(linear(), "weight")],
    "frozen norm": [lambda: frozen(nn.LayerNorm(WIDTH), "weight", "bias")],
    "unused": [lambda: Function(lambda one, other, x: one(x), linear(), linear())],
    "sometimes": [Sometimes],
    "by mode": [ByMode],
    "detached": [lambda: Function(lambda one, x: one(x) + x.detach(), linear())],
    "one module twice": [lambda: Function(lambda one, x: one(one(x).tanh()), linear())],
    "forward hook": [
        lambda: with_hook(lambda m: m.register_forward_hook(lambda _m, _a, y: y.tanh()))
    ],
    "backward hook": [lambda: with_hook(lambda m: m.register_full_backward_pre_hook(_double))],
    "custom function": [lambda: Function(lambda one, x: _Cube.apply(one(x)), linear())],
    "weight_norm": [lambda: parametrizations.weight_norm(linear())],
    "in place": [linear, partial(nn.LeakyReLU, 0.1, inplace=True)],
    "in place on the input": [partial(nn.LeakyReLU, 0.1, inplace=True)],
    "tuple": pair(lambda h: (h, h.tanh()), lambda m: m[0] + m[1]),
    "nested": pair(
        lambda h: {"h": [h, (h * 2, None)], "name": "x", "number": 3},
        lambda m: (m["h"][0] + m["h"][1][0]) * m["number"],
    ),
    "mask": pair(lambda h: [h, h > 0, (4 * h).long()], lambda m: m[0] * m[1] + m[2]),
    "same tensor twice": pair(lambda h: (h, h), lambda m: m[0] * m[1].tanh()),
    "tied": [linear],
    "parallel": [Parallel],
    **{kind: [partial(Mixture, kind)] for kind in EXPERTS},
    **{
        kind: [factory]
        for kind, factory in foreign_backward.LAYERS.items()
        if kind not in (*message_kinds.RIGHT, *message_kinds.REFUSED)
    },
    **{
        f"message: {kind}": [
            partial(lambda layers, place: layers()[place], layers, place) for place in (0, 1)
        ]
        for kind, layers in {**message_kinds.RIGHT, **message_kinds.REFUSED}.items()
    },
}
# Only as the first layer of a model.
FIRST = ("in place on the input",)
# Torch itself gives other results, or refuses them, if the forward runs twice.
NOT_RECOMPUTED = ("inner backward", "spectral_norm", "transforms")
# Has a buffer that depends on the micro-batches that a data rank has had.
ONE_DATA_RANK = ("spectral_norm",)
# Torch itself fails if it is frozen.
NOT_FROZEN = ("inner backward", "own weight")
# Layers with parameters that are always trained, unless they are frozen.
TRAINED = ("linear", "norm", "conv", "attention", "gru", "parallel", "words", *EXPERTS)
# Needs the weight in the graph of the product: refused with a split backward.
WHOLE_BACKWARD = ("penalty",)


def functional_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(output, labels)
