"""Gradient buffers of one rank, and the reductions that turn them into logical gradients.

    flat    | .. | a parameter's slot | .. |                one per dtype; see gradients.py
                   ^ view: where its gradient is summed

A step runs the reductions in this order: parts that tensor ranks hold of one gradient, then
replicas of tied parameters, then the data ranks.  After them every rank holds the gradients of its
shards of the logical parameters, or with ZeRO of its slices of the shards; step_outcome.py computes
their norm.

Layout of the gradients in flat buffers: which parameter's gradient is at which offset.

Without ZeRO, gradients that are reduced or counted alike are adjacent:

    flat    | partial .. | replicated .. | sharded over tensor ranks .. | experts .. |

With ZeRO, buckets are filled in the order of the backward pass.  Buckets of experts, which fewer
data ranks reduce, follow; buckets of gradients that other ranks contribute to before come last:

    flat    | bucket: last layer .. | bucket: .. first layer | experts | partial | tied | copies |

Both are lists of slots; `GradLayout.owned` returns the part of a slot that this rank updates.

Divide a flat buffer of gradients into buckets and slices per data rank: arithmetic, no tensors.

    entries   | a a a a a b b - c c c c - - - - | d d d d d d d d d d d d |      - padding: zeros
    buckets   |                0                |            1            |
    owners    |    0     |    1     |     2     |   0    |   1   |   2    |

An entry lies in one bucket, so that each rank owns one contiguous range of it.  A bucket is divided
evenly, so that one reduce-scatter and one all-gather handle it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from pipemega.distributed.exchanges import all_reduce, all_reduce_tied, broadcast_tied
from pipemega.distributed.mesh import Axis
from pipemega.parameters import after_autograd, shard_of

ALIGNMENT = 64
"""Every entry, and every slice of a bucket, starts at a multiple of this, for aligned loads."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Round `size` up to a multiple of `to`."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a flat buffer, divided evenly over the ranks.

    Args:
        entries: indices of its entries in the list of sizes that was given.
        starts: start of each entry in the flat buffer.
        ranks: number of slices; the size is a multiple of `ranks * ALIGNMENT`.
    """

    start: int
    stop: int
    entries: tuple[int, ...]
    starts: tuple[int, ...]
    ranks: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def share(self) -> int:
        """Number of elements that each rank owns."""
        return self.size // self.ranks

    def owned_by(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) in the flat buffer of the slice that `rank` owns."""
        start = self.start + rank * self.share
        return start, start + self.share


def fill_buckets(
    sizes: Sequence[int], ranks: int, reduce_bucket_size: int, start: int = 0
) -> tuple[Bucket, ...]:
    """Put entries into consecutive buckets, in their order, beginning at element `start`.

    A bucket takes entries while it has at most `reduce_bucket_size` elements, gaps included; a
    larger entry gets a bucket for itself.  Then the bucket is padded so that it divides evenly.
    """
    buckets: list[Bucket] = []
    for entries in _runs(sizes, reduce_bucket_size):
        starts, at = [], start
        for entry in entries:
            starts.append(at)
            at += aligned(sizes[entry])
        stop = start + aligned(at - start, ranks * ALIGNMENT)
        buckets.append(Bucket(start, stop, tuple(entries), tuple(starts), ranks))
        start = stop
    return tuple(buckets)


def _runs(sizes: Sequence[int], reduce_bucket_size: int) -> Iterator[list[int]]:
    """Yield the indices of the entries of each bucket."""
    run: list[int] = []
    filled = 0
    for entry, size in enumerate(sizes):
        if run and filled + aligned(size) > reduce_bucket_size:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += aligned(size)
    if run:
        yield run


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the intersection of two ranges [start, stop); (0, 0) if it is empty."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (0, 0)


Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, eq=False)
class GradSlot:
    """The place of one parameter's gradient: elements [start, start + numel) of its flat buffer."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    start: int

    @property
    def end(self) -> int:
        """End of the gradient."""
        return self.start + self.parameter.numel()

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the gradient that is stored in `flat` [numel].

        It has the strides of the parameter (channels last, transposed, ...): fused optimizers walk
        the memory of both in one order.
        """
        return flat.as_strided(self.parameter.shape, self.parameter.stride())

    @property
    def stop(self) -> int:
        """Start of the next slot: `end` rounded up to the alignment; the gap stays zero."""
        return self.start + aligned(self.parameter.numel())


@dataclass(frozen=True, eq=False)
class DataBucket:
    """A bucket and the slots in it.

    Args:
        number: index in the order in which all data ranks reduce.
        dtype: the dtype of the gradients; selects the flat buffer.
        place: range in the flat buffer.
        slots: the slots in the bucket, in the order of their offsets.
        partial: each tensor rank holds a part of a sum, to be reduced over the tensor axis first.
        late: the reduction over data ranks waits for the end of the step, since other ranks
            contribute to the gradients before.
        axis: the data ranks that reduce it, each of which owns a slice.
    """

    number: int
    dtype: torch.dtype
    place: Bucket
    slots: tuple[GradSlot, ...]
    partial: bool
    late: bool
    axis: Axis

    @property
    def owned(self) -> tuple[int, int]:
        """[start, stop) in the flat buffer of the slice that this rank owns."""
        return self.place.owned_by(self.axis.rank)

    @property
    def name(self) -> str:
        """Name for messages: "gradient bucket 0 (layers.1.weight to layers.0.bias)"."""
        first, *others = [slot.name for slot in self.slots]
        return f"gradient bucket {self.number} ({first}{f' to {others[-1]}' if others else ''})"


@dataclass(frozen=True, eq=False)
class GradLayout:
    """All slots, and the lengths of the flat buffers.

    Args:
        slots: all slots, in the order of the layout.
        sizes: length of each flat buffer, in elements.
        buckets: the buckets; empty where every data rank updates everything.
    """

    slots: tuple[GradSlot, ...]
    sizes: dict[torch.dtype, int]
    buckets: tuple[DataBucket, ...] = ()

    def owned(self, slot: GradSlot) -> tuple[int, int]:
        """Return [start, stop) in the flat buffer of this rank's part of `slot`, gap included."""
        if not self.buckets:
            return slot.start, slot.stop
        bucket = self.bucket_of.get(slot.name)
        if bucket is None:
            return 0, 0
        return intersection((slot.start, slot.stop), bucket.owned)

    @property
    def owned_ranges(self) -> list[tuple[torch.dtype, int, int]]:
        """(flat buffer, start, stop) of everything that this rank updates."""
        if not self.buckets:
            return [(dtype, 0, size) for dtype, size in self.sizes.items()]
        return [(bucket.dtype, *bucket.owned) for bucket in self.buckets]

    @cached_property
    def bucket_of(self) -> dict[str, DataBucket]:
        """Slot name -> its bucket; without the slots that are in none."""
        return {slot.name: bucket for bucket in self.buckets for slot in bucket.slots}

    @cached_property
    def expert_starts(self) -> dict[torch.dtype, int]:
        """Flat buffer -> start of the gradients of experts, the last ones of `whole_layout`."""
        experts = [slot for slot in self.slots if shard_of(slot.parameter).is_expert]
        return {slot.dtype: slot.start for slot in reversed(experts)}

    def span(self, slot: GradSlot) -> tuple[int, int]:
        """Return [start, stop) of this rank's part in the flattened parameter; (0, 0) if empty."""
        start, stop = intersection(self.owned(slot), (slot.start, slot.end))
        return (start - slot.start, stop - slot.start) if start < stop else (0, 0)


def whole_layout(named: Named, dtype: torch.dtype | None) -> GradLayout:
    """Return the layout for data ranks that each hold and update everything.

    Gradients that are reduced or counted alike are adjacent.

    Args:
        named: (logical name, trainable parameter).
        dtype: the dtype of the gradients; None for the dtype of each parameter.
    """

    def kind(item: tuple[str, nn.Parameter]) -> int:
        shard = shard_of(item[1])
        if shard.is_expert:
            return 3
        return 2 if shard.dim is not None else 0 if shard.partial_gradient else 1

    slots: list[GradSlot] = []
    ends: dict[torch.dtype, int] = {}
    for name, parameter in sorted(named, key=kind):
        grad_dtype = dtype if dtype is not None else parameter.dtype
        slots.append(GradSlot(name, parameter, grad_dtype, ends.get(grad_dtype, 0)))
        ends[grad_dtype] = slots[-1].stop
    return GradLayout(tuple(slots), ends)


@dataclass(frozen=True)
class ShardingSpec:
    """How gradients are sharded over the data ranks.

    Args:
        data: the data axis.
        reduce_bucket_size: most elements of a bucket.
        replica: the data ranks that have the same experts; None: all.
        partial: names of parameters of which each tensor rank holds a part of the gradient.
        late: names of parameters whose gradient gets contributions from other ranks or stages.
        aside: names of copies: their gradient is added to the gradient of another parameter, and
            not reduced.
    """

    data: Axis
    reduce_bucket_size: int
    replica: Axis | None = None
    partial: Collection[str] = ()
    late: Collection[str] = ()
    aside: Collection[str] = ()

    def kind(self, name: str, parameter: Tensor) -> "_Kind":
        """Return the kind of a slot; slots of different kinds share no bucket."""
        if name in self.aside:
            return _Kind.COPY
        if shard_of(parameter).is_expert:
            return _Kind.EXPERT
        if name in self.partial:
            return _Kind.PARTIAL
        return _Kind.LATE if name in self.late else _Kind.EARLY


class _Kind(IntEnum):
    """Kinds of slots, in the order of their buckets."""

    EARLY = 0
    EXPERT = 1
    PARTIAL = 2
    LATE = 3
    COPY = 4


def bucketed_layout(named: Named, dtype: torch.dtype | None, sharding: ShardingSpec) -> GradLayout:
    """Return a layout of buckets in the order of the backward pass.

    The parameters of a bucket have one dtype.

    Args:
        named: (logical name, trainable parameter), in the order of the model.
        dtype: the dtype of the gradients; None for the dtype of each parameter.
    """
    slots: list[GradSlot] = []
    buckets: list[DataBucket] = []
    ends: dict[torch.dtype, int] = {}
    order = {name: number for number, (name, _) in enumerate(reversed(named))}
    groups: dict[tuple[_Kind, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(named):
        key = sharding.kind(name, parameter), parameter.dtype
        groups.setdefault(key, []).append((name, parameter))
    for kind, parameter_dtype in sorted(groups, key=lambda key: key[0]):
        group = groups[kind, parameter_dtype]
        grad_dtype = dtype if dtype is not None else parameter_dtype
        sizes = [parameter.numel() for _, parameter in group]
        axis, bucket_size = sharding.data, sharding.reduce_bucket_size
        if kind == _Kind.EXPERT and sharding.replica is not None:
            axis = sharding.replica
        if kind == _Kind.COPY:
            # Copies are in no bucket: lay them out as one bucket of one rank.
            axis, bucket_size = Axis("copies"), sum(map(aligned, sizes))
        for place in fill_buckets(sizes, axis.size, bucket_size, ends.get(grad_dtype, 0)):
            ends[grad_dtype] = place.stop
            here = tuple(
                GradSlot(*group[entry], grad_dtype, start)
                for entry, start in zip(place.entries, place.starts, strict=True)
            )
            slots += here
            if kind != _Kind.COPY:
                partial, late = kind == _Kind.PARTIAL, kind >= _Kind.PARTIAL
                buckets.append(DataBucket(0, grad_dtype, place, here, partial, late, axis))
    # A bucket is complete with the last of its gradients.
    buckets.sort(key=lambda bucket: (bucket.late, order[bucket.slots[-1].name]))
    numbered = (replace(bucket, number=number) for number, bucket in enumerate(buckets))
    return GradLayout(tuple(slots), ends, tuple(numbered))


class GradientBuffer:
    """One flat buffer per dtype, with a view for each trainable parameter.

    Where buffer and parameter have the same dtype, `parameter.grad` is the view, and autograd adds
    to it in place.  Otherwise a hook adds the gradient from autograd to the view and frees it.
    Either way gradients are summed in the order of the backward passes.  A parameter that gets no
    gradient keeps zeros, which an optimizer treats as a gradient of zero.

    If other code sets a `grad` to None (`optimizer.zero_grad()`), the sum is discarded: see
    `restore_views`.

    Args:
        named_parameters: (logical name, parameter), each parameter once; those that need no
            gradient are left out.
        dtype: the dtype in which gradients are summed; None for the dtype of each parameter.
        layout: the layout of the flat buffers; None for `whole_layout`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype | None = None,
        layout: GradLayout | None = None,
    ) -> None:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.layout = layout if layout is not None else whole_layout(named, dtype)
        self.slots: tuple[GradSlot, ...] = self.layout.slots
        """The slots in the order of the layout."""
        self.flats: dict[torch.dtype, Tensor] = {}
        """The buffers: [elements]."""
        for slot in self.slots:
            if slot.dtype not in self.flats:
                size, device = self.layout.sizes[slot.dtype], slot.parameter.device
                self.flats[slot.dtype] = torch.zeros(size, dtype=slot.dtype, device=device)
        self._views = {
            id(s.parameter): s.view_of(self.flats[s.dtype][s.start : s.end]) for s in self.slots
        }
        for slot in self.slots:
            if not self._in_place(slot):
                after_autograd(slot.parameter, self._add_autograd_grad)
        self._attach_grads()

    def view(self, parameter: nn.Parameter) -> Tensor:
        """Return the view in which the gradient of `parameter` is summed; it has its shape."""
        return self._views[id(parameter)]

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that comes from a weight-gradient job, and not from autograd."""
        if parameter.numel():
            self.view(parameter).add_(gradient)

    def fuses(self, parameter: nn.Parameter, dy: Tensor) -> bool:
        """Return whether `add_product` takes products of the dtype of `dy`."""
        if not parameter.numel():
            return False  # it has no view
        dtype = self.view(parameter).dtype
        # torch multiplies halves into fp32 on CUDA devices only.
        return dy.dtype == dtype or (
            dy.is_cuda and dtype == torch.float32 and dy.dtype in (torch.float16, torch.bfloat16)
        )

    def add_product(self, parameter: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Add the weight gradient of a linear, dyᵀ x, by one kernel that stores nothing else.

        Shape:
            dy [n, out], x [n, in] of the same dtype; the parameter [out, in]
        """
        view = self.view(parameter)
        if dy.dtype == view.dtype:
            view.addmm_(dy.t(), x)
        else:
            torch.addmm(view, dy.t(), x, out_dtype=view.dtype, out=view)

    def zero(self) -> None:
        """Set all gradients to zero, for the next step."""
        for flat in self.flats.values():
            flat.zero_()
        self._attach_grads()

    def restore_views(self) -> None:
        """Restore views as `grad` where other code replaced them since the buffer was zeroed.

        Where it set None, the view becomes zero; another tensor is copied to the view.
        """
        for slot in self.slots:
            gradient, view = slot.parameter.grad, self.view(slot.parameter)
            if not self._in_place(slot) or gradient is view:
                continue
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            slot.parameter.grad = view

    def _in_place(self, slot: GradSlot) -> bool:
        return slot.dtype == slot.parameter.dtype

    def _attach_grads(self) -> None:
        for slot in self.slots:
            in_place = self._in_place(slot)
            slot.parameter.grad = self.view(slot.parameter) if in_place else None

    def _add_autograd_grad(self, parameter: Tensor) -> None:
        # A compiled layer calls this also for the weights whose gradients are deferred.
        if parameter.grad is None:
            return
        self._views[id(parameter)].add_(parameter.grad)
        parameter.grad = None


@dataclass(frozen=True)
class DataReduction:
    """How gradients are reduced over the data ranks.

    Args:
        op: "mean" or "sum" (`gradient_allreduce_op`).
        prescale: divide by the number of ranks before the sum, not after (`prescale_gradients`).
        predivide_factor: divide by this before the sum, and correct for it after.
        dtype: dtype that is sent (`communication_data_type`); None for the dtype of the buffer.
    """

    op: Literal["mean", "sum"] = "mean"
    prescale: bool = False
    predivide_factor: float = 1.0
    dtype: torch.dtype | None = None

    def factors(self, size: int) -> tuple[float, float]:
        """Return the factors of the gradients before and after the sum over `size` ranks."""
        before = 1 / size if self.prescale else 1 / self.predivide_factor
        if self.op == "sum":
            return before, float(size) if self.prescale else self.predivide_factor
        return before, 1.0 if self.prescale else self.predivide_factor / size


def reduce_partial(gradients: GradientBuffer, tensor: Axis) -> None:
    """Sum partial gradients over the tensor axis: one all-reduce per flat buffer."""
    if tensor.size == 1:
        return
    ends: dict[torch.dtype, int] = {}
    for slot in gradients.slots:
        if shard_of(slot.parameter).partial_gradient:
            ends[slot.dtype] = slot.stop
    for dtype, end in ends.items():
        all_reduce(gradients.flats[dtype][:end], tensor)


def reduce_tied(gradients: GradientBuffer, tied: Mapping[str, Axis]) -> None:
    """Sum the gradients of tied parameters over the pipeline ranks that hold a replica.

    Args:
        tied: logical name -> the ranks that hold it; names that this rank does not hold are
            ignored.
    """
    # Sorted by name: ranks that share several tied parameters must reduce them in one order.
    for slot in sorted(gradients.slots, key=lambda slot: slot.name):
        axis = tied.get(slot.name)
        if axis is not None and axis.size > 1:
            all_reduce_tied(gradients.view(slot.parameter), axis)


def equalize_tied(gradients: GradientBuffer, tied: Mapping[str, Axis], data: Axis) -> None:
    """Copy the gradients of tied parameters from their first replica, after `reduce_data`.

    The replicas are at different places of buffers of different lengths. Backends add the parts of
    three and more ranks in an order that depends on both, and then the replicas would get sums that
    differ by rounding, and drift apart step by step. The sum of two parts has no order.
    """
    if data.size <= 2:
        return
    for slot in sorted(gradients.slots, key=lambda slot: slot.name):
        axis = tied.get(slot.name)
        if axis is not None and axis.size > 1:
            broadcast_tied(gradients.view(slot.parameter), axis)


def reduce_data(
    gradients: GradientBuffer, data: Axis, reduction: DataReduction, replica: Axis | None = None
) -> float:
    """Sum over the data axis: one all-reduce per flat buffer.

    Gradients of experts, which follow the others, already contain the tokens of all ranks of the
    axis "expert". They are summed over the other data ranks, with the factors of all data ranks.

    Args:
        replica: the data ranks that have the same experts; None: all.

    Returns:
        the factor that the gradients still have to be multiplied by.  The caller merges it into
        its own multiplication of the gradients.
    """
    if data.size == 1:
        return 1.0
    before, after = reduction.factors(data.size)
    for dtype, flat in gradients.flats.items():
        if before != 1.0:
            flat.mul_(before)
        start = gradients.layout.expert_starts.get(dtype, flat.numel())
        for part, axis in ((flat[:start], data), (flat[start:], replica or data)):
            if not part.numel() or axis.size == 1:
                continue
            if reduction.dtype is None or reduction.dtype == dtype:
                all_reduce(part, axis)
            else:
                sent = part.to(reduction.dtype)
                all_reduce(sent, axis)
                part.copy_(sent)
    return after


@torch.no_grad()
def equalize_replicas(
    parameters: Named, tied: Mapping[str, Axis], wait: Callable[[], None] = lambda: None
) -> None:
    """Copy tied parameters from their first replica, if replicas are on different devices.

    A CPU and a GPU round the same step differently, and replicas on both would drift apart.

    Args:
        tied: logical name -> the ranks that hold it.
        wait: called before the first copy.
    """
    mixed = {name: p for name, p in parameters if name in tied and tied[name].devices}
    if mixed:
        wait()
    for name in sorted(mixed):
        broadcast_tied(mixed[name], tied[name])
