"""Pairs of layers with a message of an unusual kind between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 4


@dataclass
class Inner:
    scale: Tensor
    name: str = "inner"


@dataclass(frozen=True)
class Message:
    hidden: Tensor
    inner: list[Inner]
    kept: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.hidden, Tensor), "not built anew around other values"


@dataclass(slots=True)
class Slotted:
    hidden: Tensor
    mask: Tensor | None = None


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.parts = {"hidden": hidden}


class Source(nn.Module):
    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self._pack = nn.Linear(WIDTH, WIDTH), pack

    def forward(self, x: Tensor) -> Any:
        return self._pack(self.linear(x))


class Target(nn.Module):
    def __init__(self, unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.linear, self._unpack = nn.Linear(WIDTH, WIDTH), unpack

    def forward(self, message: Any) -> Tensor:
        y: Tensor = self.linear(self._unpack(message))
        return y


class FailsOnMeta(nn.Linear):
    """Fails on the meta device in a stage with a tanh before it, but not alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta and type(x.grad_fn).__name__ == "TanhBackward0":
            raise ValueError("no kernel")
        return super().forward(x)


def _pair(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    return lambda: [Source(pack), Target(unpack)]


def _with_part(message: tuple[Tensor, Tensor]) -> Tensor:
    hidden, part = message
    return F.relu(hidden, inplace=True) + part.sum(-1, keepdim=True)


RIGHT: Mapping[str, Any] = {
    "dataclass": _pair(
        lambda h: Message(h, [Inner(h.tanh()), Inner(torch.ones(()))]),
        lambda m: m.hidden * m.inner[0].scale * m.inner[1].scale * m.kept,
    ),
    "slots": _pair(
        lambda h: (Slotted(h), Slotted(h, h.detach() > 0)), lambda m: m[0].hidden * m[1].mask
    ),
    "views": _pair(lambda h: (h, h[..., :2]), lambda m: m[0] + m[1].sum(-1, keepdim=True)),
    "in place": _pair(lambda h: (h, h[..., :2].clone()), _with_part),
    "created": _pair(lambda h: (h, torch.arange(float(WIDTH))), lambda m: m[0] * m[1]),
    "fails on meta": lambda: [FailsOnMeta(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)],
}
REFUSED: Mapping[str, Any] = {
    "object": _pair(Opaque, lambda m: m.parts["hidden"]),
    "in place of a view": _pair(lambda h: (h, h[..., :2]), _with_part),
}
