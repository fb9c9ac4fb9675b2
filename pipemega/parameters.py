"""What a rank's tensor is of the parameter of the unsplit model, and how it is first drawn.

A *logical parameter* is one parameter of the unsplit model, however many ranks hold pieces or
copies of it.  Parallel layers describe their parameters with a `Shard`; a parameter that nobody
described is held whole by every tensor rank.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place from a generator, element by element: `normal_`, `uniform_`..."""

# Elements drawn from one generator.  A constant of the format: it decides the numbers drawn.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Shard:
    """Which part of a logical parameter a rank's tensor holds.

    Args:
        shape: of the logical parameter, without padding.
        dim: the dim that is cut over the tensor ranks; None where each of them holds the whole.
        ranges: [start, stop) along `dim` in the logical parameter, in the local order.  A fused
            query-key-value weight has three.  What is left of the local tensor is padding.
        partial_gradient: the whole is on every tensor rank, but each sees only a part of its
            gradient (a slice of the sequence, say): to be summed over the tensor axis.
        draw: how the logical parameter is first drawn; None keeps what the constructor set.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    partial_gradient: bool = False
    draw: Draw | None = None

    def take(self, whole: Tensor, into: Tensor) -> None:
        """Copies this shard of the logical `whole` into the local tensor; padding becomes 0."""
        with torch.no_grad():
            if self.dim is None:
                into.copy_(whole)
                return
            into.zero_()
            for start, length, offset in self._pieces():
                into.narrow(self.dim, offset, length).copy_(whole.narrow(self.dim, start, length))

    def put(self, local: Tensor, into: Tensor) -> None:
        """Copies the local tensor to its place in the logical parameter `into`."""
        with torch.no_grad():
            if self.dim is None:
                into.copy_(local)
                return
            for start, length, offset in self._pieces():
                into.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(start in the whole, length, start in the local tensor) of each range."""
        pieces, offset = [], 0
        for start, stop in self.ranges:
            pieces.append((start, stop - start, offset))
            offset += stop - start
        return pieces


def describe(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Attaches `shard` to `parameter`, and returns it."""
    parameter._pipemega_shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """What was described, or the whole parameter on every tensor rank."""
    shard = getattr(parameter, "_pipemega_shard", None)
    return shard if shard is not None else Shard(tuple(parameter.shape))


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def initialize_parameters(module: nn.Module, prefix: str, seed: int) -> None:
    """Draws each described parameter by its logical name, so that no mesh changes the numbers.

    Only the blocks that this rank's shard touches are drawn, so the whole need not fit.
    """
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        if shard.draw is not None:
            _draw(parameter, shard, shard.draw, f"{prefix}.{name}" if prefix else name, seed)


def _draw(parameter: nn.Parameter, shard: Shard, draw: Draw, name: str, seed: int) -> None:
    rows, *rest = shard.shape
    row_elements = max(1, int(torch.Size(rest).numel()))
    step = max(1, _BLOCK // row_elements)
    local = parameter.data
    if shard.dim is not None:
        local.zero_()
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if shard.dim == 0 and not any(a < stop and start < b for a, b in shard.ranges):
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, name, start // step))
        # Drawn on the CPU in the dtype of the parameter, whatever device it lives on.
        block = torch.empty(stop - start, *rest, dtype=parameter.dtype)
        draw(block, generator)
        if shard.dim is None:
            local[start:stop].copy_(block)
        elif shard.dim == 0:
            for at, length, offset in shard._pieces():
                low, high = max(at, start), min(at + length, stop)
                if low < high:
                    local[offset + low - at : offset + high - at].copy_(block[low - start : high - start])
        else:
            for at, length, offset in shard._pieces():
                local[start:stop].narrow(shard.dim, offset, length).copy_(
                    block.narrow(shard.dim, at, length)
                )
