"""What a rank's tensor is of the parameter of the unsplit model, and how it is first drawn.

A *logical parameter* is one parameter of the unsplit model, however many ranks hold pieces or
copies of it.  Parallel layers describe their parameters with a `Shard`; a parameter that nobody
described is held whole by every tensor rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipemega.errors import ConfigError
from pipemega.random import derive_seed as derive_seed

Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place from a generator, element by element: `normal_`, `uniform_`..."""

# Elements drawn from one generator.  A constant of the format: it decides the numbers drawn.
_BLOCK = 1 << 22


def normal(std: float) -> Draw:
    """Draws from a normal distribution around 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class Shard:
    """Which part of a logical parameter a rank's tensor holds.

        logical  [ q q q q | k k | v v ]      rank 0 of 2 holds  [ q q k v ]
                   0 - 2     4-5   6-7        ranges = ((0, 2), (4, 5), (6, 7))

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

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(start in the logical parameter, length, start in the local tensor) of each range."""
        pieces, offset = [], 0
        for start, stop in self.ranges:
            pieces.append((start, stop - start, offset))
            offset += stop - start
        return tuple(pieces)

    def take(self, whole: Tensor, into: Tensor) -> None:
        """Copies this shard of the logical `whole` into the local tensor; padding becomes 0."""
        with torch.no_grad():
            if self.dim is None:
                into.copy_(whole)
                return
            into.zero_()
            for start, length, offset in self.pieces:
                into.narrow(self.dim, offset, length).copy_(whole.narrow(self.dim, start, length))

    def put(self, local: Tensor, into: Tensor) -> None:
        """Copies the local tensor, less its padding, to its place in the logical `into`."""
        with torch.no_grad():
            if self.dim is None:
                into.copy_(local)
                return
            for start, length, offset in self.pieces:
                into.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))


def describe(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Attaches `shard` to `parameter`, and returns it."""
    parameter._pipemega_shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """What was described, or the whole parameter on every tensor rank."""
    shard = getattr(parameter, "_pipemega_shard", None)
    return shard if shard is not None else Shard(tuple(parameter.shape))


def mark_partial(module: nn.Module) -> nn.Module:
    """Says of a module that sees a slice of the sequence: its gradients are parts of a sum.

    For the norms between row- and column-parallel layers under sequence parallelism.  Parameters
    that are cut over the tensor ranks are left as they are.  Returns `module`.
    """
    for parameter in module.parameters():
        shard = shard_of(parameter)
        if shard.dim is None:
            describe(parameter, replace(shard, partial_gradient=True))
    return module


def even_share(total: int, ranks: int, what: str) -> int:
    """`total / ranks`, for what can only be cut evenly over the tensor ranks.

    Args:
        what: the name of `total` as the user wrote it.

    Raises:
        ConfigError: it leaves a remainder, or nothing for each rank.
    """
    if total % ranks or total < ranks:
        below = total // ranks * ranks
        nearest = f"nearest that fit are {below} and {below + ranks}"
        raise ConfigError(
            f"{what} ({total}) must be a multiple of the tensor ranks (mesh.tensor = {ranks}); "
            f"the {nearest if below else f'least that fits is {ranks}'}"
        )
    return total // ranks


def initialize_parameters(module: nn.Module, prefix: str, seed: int) -> None:
    """Draws each described parameter by its logical name, so that no mesh changes the numbers.

    Only the blocks of rows that this rank's shard touches are drawn, so the whole need not fit.
    On the meta device there are no numbers, and none are drawn.
    """
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        if shard.draw is not None and not parameter.is_meta:
            _draw(parameter, shard, shard.draw, f"{prefix}.{name}" if prefix else name, seed)


@torch.no_grad()
def _draw(parameter: nn.Parameter, shard: Shard, draw: Draw, name: str, seed: int) -> None:
    # A scalar is drawn as one row.
    rows, *rest = shard.shape or (1,)
    step = max(1, _BLOCK // max(1, torch.Size(rest).numel()))
    local = parameter.data.view(1) if not shard.shape else parameter.data
    if shard.dim == 0:
        local.zero_()
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        wanted = _rows_within(shard, start, stop)
        if shard.dim == 0 and not wanted:
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, name, start // step))
        # Drawn on the CPU in the dtype of the parameter, whatever device it lives on.
        block = torch.empty(stop - start, *rest, dtype=parameter.dtype)
        draw(block, generator)
        if shard.dim == 0:
            for low, length, offset in wanted:
                local.narrow(0, offset, length).copy_(block.narrow(0, low, length))
        else:
            shard.take(block, local[start:stop])


def _rows_within(shard: Shard, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(row of the block, length, local row) of what the shard holds of rows [start, stop)."""
    found = []
    for first, length, offset in shard.pieces:
        low, high = max(first, start), min(first + length, stop)
        if low < high:
            found.append((low - start, high - low, offset + low - first))
    return found
