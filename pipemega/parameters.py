"""Shard: which part of a logical parameter a rank has, and how the parameter is initialized.

A *logical parameter* is one parameter of the unsharded model; any number of ranks have shards or
copies of it. Parallel layers attach a `Shard` to their parameters; a parameter without a `Shard`
is replicated on all tensor ranks.
"""

import math
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError
from pipemega.random import derive_seed as derive_seed

InitMethod = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place from a generator, element by element: `normal_`, `uniform_`..."""

# Elements initialized from one generator. Changing it changes the initial values.
_BLOCK = 1 << 22


def normal(std: float) -> InitMethod:
    """Return an initializer with a normal distribution around 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class Shard:
    """The part of a logical parameter in a rank's tensor.

        logical  [ q q q q | k k | v v ]      rank 0 of 2 has  [ q q k v ]
                   0 - 2     4-5   6-7        ranges = ((0, 2), (4, 5), (6, 7))

    Args:
        shape: shape of the logical parameter, without padding.
        dim: the dim that is sharded over the tensor ranks; None if the parameter is replicated.
        rows: [start, stop) of dim 0 in the logical parameter: the experts of this rank, with
            `mesh.expert`; None: every data rank has the whole parameter. `dim` is not 0 then.
        is_stacked: dim 0 counts parameters of experts.
        ranges: [start, stop) along `dim` in the logical parameter, in the local order. A fused
            query-key-value weight has three. The rest of the local tensor is padding.
        partial_gradient: the parameter is replicated, but each tensor rank computes only a part
            of its gradient (from a slice of the sequence): sum it over the tensor axis.
        init_method: initializes the logical parameter; None keeps the value of the constructor.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    partial_gradient: bool = False
    init_method: InitMethod | None = None
    rows: tuple[int, int] | None = None
    is_stacked: bool = False

    @property
    def dims(self) -> int:
        """Number of dims of each parameter in a stack: 1 for norms and biases."""
        return len(self.shape) - self.is_stacked

    @property
    def is_expert(self) -> bool:
        """Whether the ranks of the axis "expert" have other parts of the parameter."""
        return self.rows is not None

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the whole parameter."""
        return self.dim is None and self.rows is None

    @property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """(start in the logical parameter, length, start in the local tensor) of each range."""
        segments, offset = [], 0
        for start, stop in self.ranges:
            segments.append((start, stop - start, offset))
            offset += stop - start
        return tuple(segments)

    def padding(self, local_shape: tuple[int, ...], start: int, stop: int) -> int:
        """Return how many of the elements [start, stop) of the flattened local tensor are padding.

        Args:
            local_shape: shape of the local tensor.
        """
        if self.dim is None:
            return 0
        inner = math.prod(local_shape[self.dim + 1 :])
        block = local_shape[self.dim] * inner
        filled = sum(last - first for first, last in self.ranges) * inner

        def before(end: int) -> int:
            return end // block * (block - filled) + max(0, end % block - filled)

        return before(stop) - before(start) if block else 0

    def copy_from_full(self, full: Tensor, local: Tensor) -> None:
        """Copy this shard of the logical tensor `full` into `local`; set padding to 0."""
        with torch.no_grad():
            full = self._own_rows(full)
            if self.dim is None:
                local.copy_(full)
                return
            local.zero_()
            for start, length, offset in self.segments:
                local.narrow(self.dim, offset, length).copy_(full.narrow(self.dim, start, length))

    def copy_to_full(self, local: Tensor, full: Tensor) -> None:
        """Copy `local` without its padding into the logical tensor `full`."""
        with torch.no_grad():
            full = self._own_rows(full)
            if self.dim is None:
                full.copy_(local)
                return
            for start, length, offset in self.segments:
                full.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))

    def _own_rows(self, full: Tensor) -> Tensor:
        """Return the view of a logical tensor with the rows of this rank."""
        if self.rows is None:
            return full
        start, stop = self.rows
        return full.narrow(0, start, stop - start)


def mark_transposed(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that HF stores transposed (transformers' Conv1D); return it."""
    parameter._pipemega_transposed = True  # type: ignore[attr-defined]
    return parameter


def is_transposed(tensor: Tensor) -> bool:
    """Return whether HF stores the transpose of this parameter."""
    return getattr(tensor, "_pipemega_transposed", False)


def attach_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Attach `shard` to `parameter`; return the parameter."""
    parameter._pipemega_shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """Return the attached shard; without one, a shard of the whole parameter."""
    shard = getattr(parameter, "_pipemega_shard", None)
    return shard if shard is not None else Shard(tuple(parameter.shape))


def replicas_of(parameter: Tensor, mesh: Mesh) -> Axis:
    """Return the data ranks that have the same part of the parameter as this rank."""
    return mesh.replica if shard_of(parameter).is_expert else mesh.data


def keep_fp32_in(parameter: nn.Parameter, dtypes: Collection[torch.dtype]) -> nn.Parameter:
    """Let a model in one of these dtypes keep the parameter in fp32; return the parameter."""
    parameter._pipemega_fp32_in = tuple(dtypes)  # type: ignore[attr-defined]
    return parameter


def is_kept_fp32(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a model in `dtype` keeps the parameter in fp32."""
    return dtype in getattr(parameter, "_pipemega_fp32_in", ())


def mark_partial_gradient(module: nn.Module) -> nn.Module:
    """Mark the gradients of a module that computes on a slice of the sequence as partial.

    For the norms between row- and column-parallel layers under sequence parallelism. Sharded
    parameters are not changed. Returns `module`.
    """
    for parameter in module.parameters():
        shard = shard_of(parameter)
        if shard.dim is None:
            attach_shard(parameter, replace(shard, partial_gradient=True))
    return module


def even_share(total: int, ranks: int, what: str) -> int:
    """Return `total / ranks` for a size that must be a multiple of the tensor ranks.

    Args:
        what: the name of `total` in the config or the call of the user.

    Raises:
        ConfigError: `total` is not a multiple of `ranks`, or 0.
    """
    if total % ranks or total < ranks:
        below = total // ranks * ranks
        nearest = f"nearest that fit are {below} and {below + ranks}"
        raise ConfigError(
            f"{what} ({total}) must be a multiple of the tensor ranks (mesh.tensor = {ranks}); "
            f"the {nearest if below else f'smallest that fits is {ranks}'}"
        )
    return total // ranks


def after_autograd(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call a bound method each time when autograd has accumulated the gradient of `parameter`.

    The parameter does not keep the object of the method alive: torch's collector of garbage cannot
    see a cycle through such a hook, and the memory of the engine would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    vars(hook)["of_pipemega"] = True
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def has_user_hook(parameter: Tensor) -> bool:
    """Return whether a hook on the gradient of `parameter` is not one of pipemega."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or not all(
        getattr(hook, "of_pipemega", False) for hook in after.values()
    )


def initialize_parameters(module: nn.Module, prefix: str, seed: int) -> None:
    """Initialize each parameter with an init method, seeded by its logical name.

    So the initial values are equal on every mesh. Only the blocks of rows that overlap this rank's
    shard are generated, so the full parameter need not fit into memory. Parameters on the meta
    device are skipped.
    """
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        if shard.init_method is not None and not parameter.is_meta:
            _initialize(
                parameter, shard, shard.init_method, f"{prefix}.{name}" if prefix else name, seed
            )


@torch.no_grad()
def _initialize(
    parameter: nn.Parameter, shard: Shard, init_method: InitMethod, name: str, seed: int
) -> None:
    # A scalar is initialized as one row.
    rows, *rest = shard.shape or (1,)
    step = max(1, _BLOCK // max(1, torch.Size(rest).numel()))
    local = parameter.data.view(1) if not shard.shape else parameter.data
    if shard.dim == 0:
        local.zero_()
    # The rows of a block that this rank has, which may be cut along another dim.
    of_rows = replace(shard, rows=None, dim=shard.dim or None)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        rows_here = _rows_within(shard, start, stop)
        if not rows_here:
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, name, start // step))
        # Always on the CPU and in the dtype of the parameter, so that devices do not differ.
        block = torch.empty(stop - start, *rest, dtype=parameter.dtype)
        init_method(block, generator)
        for low, length, offset in rows_here:
            of_rows.copy_from_full(block.narrow(0, low, length), local.narrow(0, offset, length))


def _rows_within(shard: Shard, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (row in the block, length, local row) of the shard's part of rows [start, stop)."""
    if shard.dim == 0:
        segments = shard.segments
    else:
        begin, end = shard.rows or (0, shard.shape[0] if shard.shape else 1)
        segments = ((begin, end - begin, 0),)
    overlaps = []
    for first, length, offset in segments:
        low, high = max(first, start), min(first + length, stop)
        if low < high:
            overlaps.append((low - start, high - low, offset + low - first))
    return overlaps
