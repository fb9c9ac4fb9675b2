"""Layout of the gradients in flat buffers: which parameter's gradient is at which offset.

Without ZeRO, gradients that are reduced or counted alike are adjacent:

    flat    | partial .. | replicated .. | sharded over tensor ranks .. |     one per dtype

With ZeRO, buckets are filled in the order of the backward pass.  Buckets of gradients that other
ranks contribute to before the data ranks come last:

    flat    | bucket: last layer .. | bucket: .. first layer | partial | tied | copies |

Both are lists of slots; `GradLayout.owned` returns the part of a slot that this rank updates.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from pipemega.optimizer.buckets import Bucket, aligned, fill_buckets, intersection
from pipemega.parameters import shard_of

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
        dtype: of the gradients; selects the flat buffer.
        place: range in the flat buffer.
        slots: in the order of their offsets.
        partial: each tensor rank holds a part of a sum, to be reduced over the tensor axis first.
        late: the reduction over data ranks waits for the end of the step, since other ranks
            contribute to the gradients before.
    """

    number: int
    dtype: torch.dtype
    place: Bucket
    slots: tuple[GradSlot, ...]
    partial: bool
    late: bool

    @property
    def name(self) -> str:
        """Name for messages: "gradient bucket 0 (layers.1.weight to layers.0.bias)"."""
        first, *others = [slot.name for slot in self.slots]
        return f"gradient bucket {self.number} ({first}{f' to {others[-1]}' if others else ''})"


@dataclass(frozen=True, eq=False)
class GradLayout:
    """All slots, and the lengths of the flat buffers.

    Args:
        slots: in the order of the layout.
        sizes: length of each flat buffer, in elements.
        buckets: empty where every data rank updates everything.
        rank: of this process on the data axis.
    """

    slots: tuple[GradSlot, ...]
    sizes: dict[torch.dtype, int]
    buckets: tuple[DataBucket, ...] = ()
    rank: int = 0

    def owned(self, slot: GradSlot) -> tuple[int, int]:
        """Return [start, stop) in the flat buffer of this rank's part of `slot`, gap included."""
        if not self.buckets:
            return slot.start, slot.stop
        bucket = self.bucket_of.get(slot.name)
        if bucket is None:
            return 0, 0
        return intersection((slot.start, slot.stop), bucket.place.owned_by(self.rank))

    @property
    def owned_ranges(self) -> list[tuple[torch.dtype, int, int]]:
        """(flat buffer, start, stop) of everything that this rank updates."""
        if not self.buckets:
            return [(dtype, 0, size) for dtype, size in self.sizes.items()]
        return [(bucket.dtype, *bucket.place.owned_by(self.rank)) for bucket in self.buckets]

    @cached_property
    def bucket_of(self) -> dict[str, DataBucket]:
        """Slot name -> its bucket; without the slots that are in none."""
        return {slot.name: bucket for bucket in self.buckets for slot in bucket.slots}

    def span(self, slot: GradSlot) -> tuple[int, int]:
        """Return [start, stop) of this rank's part in the flattened parameter; (0, 0) if empty."""
        start, stop = intersection(self.owned(slot), (slot.start, slot.end))
        return (start - slot.start, stop - slot.start) if start < stop else (0, 0)


def whole_layout(named: Named, dtype: torch.dtype | None) -> GradLayout:
    """Return the layout for data ranks that each hold and update everything.

    Gradients that are reduced or counted alike are adjacent.

    Args:
        named: (logical name, trainable parameter).
        dtype: of the gradients; None for that of each parameter.
    """

    def kind(item: tuple[str, nn.Parameter]) -> int:
        shard = shard_of(item[1])
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
        ranks, rank: of the data axis.
        reduce_bucket_size: most elements of a bucket.
        partial: names of parameters of which each tensor rank holds a part of the gradient.
        late: names of parameters whose gradient gets contributions from other ranks or stages.
        aside: names of copies: their gradient is added to that of another, and not reduced.
    """

    ranks: int
    rank: int
    reduce_bucket_size: int
    partial: Collection[str] = ()
    late: Collection[str] = ()
    aside: Collection[str] = ()

    def kind(self, name: str) -> int:
        """Return the sort key of a slot; slots of different kinds share no bucket."""
        if name in self.aside:
            return 3
        return 1 if name in self.partial else 2 if name in self.late else 0


def bucketed_layout(named: Named, dtype: torch.dtype | None, sharding: ShardingSpec) -> GradLayout:
    """Return a layout of buckets in the order of the backward pass.

    The parameters of a bucket have one dtype.

    Args:
        named: (logical name, trainable parameter), in the order of the model.
        dtype: of the gradients; None for that of each parameter.
    """
    slots: list[GradSlot] = []
    buckets: list[DataBucket] = []
    ends: dict[torch.dtype, int] = {}
    groups: dict[tuple[int, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(named):
        groups.setdefault((sharding.kind(name), parameter.dtype), []).append((name, parameter))
    for kind, parameter_dtype in sorted(groups, key=lambda key: key[0]):
        group = groups[kind, parameter_dtype]
        grad_dtype = dtype if dtype is not None else parameter_dtype
        sizes = [parameter.numel() for _, parameter in group]
        ranks, bucket_size = sharding.ranks, sharding.reduce_bucket_size
        if kind == 3:
            # Copies are in no bucket: lay them out as one bucket of one rank.
            ranks, bucket_size = 1, sum(map(aligned, sizes))
        for place in fill_buckets(sizes, ranks, bucket_size, ends.get(grad_dtype, 0)):
            ends[grad_dtype] = place.stop
            here = tuple(
                GradSlot(*group[entry], grad_dtype, start)
                for entry, start in zip(place.entries, place.starts, strict=True)
            )
            slots += here
            if kind != 3:
                number = len(buckets)
                buckets.append(
                    DataBucket(number, grad_dtype, place, here, kind == 1, late=kind > 0)
                )
    return GradLayout(tuple(slots), ends, tuple(buckets), sharding.rank)
