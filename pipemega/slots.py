"""Where the gradient of each parameter lies in the flat buffers.

Whole, what is reduced or counted alike lies side by side:

    flat    | partial .. | replicated .. | cut over the tensor ranks .. |     one per dtype

Cut over the data ranks (ZeRO), buckets fill up in the order of the backward pass, and those that
other ranks add something to before the data ranks do come last:

    flat    | bucket: last layer .. | bucket: .. first layer | partial | tied | copies |

Both are one list of slots; `Layout.owned` says which part of a slot this rank steps on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from pipemega.buckets import Bucket, aligned, common_part, fill_buckets

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one parameter's gradient: elements [start, start + numel) of its flat."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    start: int

    @property
    def end(self) -> int:
        """Of the view."""
        return self.start + self.parameter.numel()

    @property
    def stop(self) -> int:
        """Where the next slot starts: the end of the view, aligned; the gap stays zero."""
        return self.start + aligned(self.parameter.numel())


@dataclass(frozen=True, eq=False)
class DataBucket:
    """A bucket, and whose gradients are in it.

    Args:
        number: in the order in which all data ranks reduce.
        dtype: of the gradients: names the flat.
        place: in the flat.
        slots: in the order of their places.
        partial: tensor ranks hold parts, to be summed before.
        late: the sum over data ranks waits for the end of the step, since other ranks add to it.
    """

    number: int
    dtype: torch.dtype
    place: Bucket
    slots: tuple[Slot, ...]
    partial: bool
    late: bool

    @property
    def name(self) -> str:
        """For messages."""
        first, *others = [slot.name for slot in self.slots]
        return f"gradient bucket {self.number} ({first}{f' to {others[-1]}' if others else ''})"


@dataclass(frozen=True, eq=False)
class Layout:
    """All slots, and how long the flats are.

    Args:
        slots: in the order of the layout.
        sizes: of the flats, in elements.
        buckets: empty where every data rank works on all of it.
        rank: of this process on the data axis.
    """

    slots: tuple[Slot, ...]
    sizes: dict[torch.dtype, int]
    buckets: tuple[DataBucket, ...] = ()
    rank: int = 0

    def owned(self, slot: Slot) -> tuple[int, int]:
        """[start, stop) in the flat of what this rank owns of `slot`, its gap included."""
        if not self.buckets:
            return slot.start, slot.stop
        bucket = self.bucket_of.get(slot.name)
        if bucket is None:
            return 0, 0
        return common_part((slot.start, slot.stop), bucket.place.owned_by(self.rank))

    @cached_property
    def bucket_of(self) -> dict[str, DataBucket]:
        """By the name of the slot; of those that are in one."""
        return {slot.name: bucket for bucket in self.buckets for slot in bucket.slots}

    def span(self, slot: Slot) -> tuple[int, int]:
        """[start, stop) of what this rank owns, in the flattened parameter; (0, 0) for nothing."""
        start, stop = common_part(self.owned(slot), (slot.start, slot.end))
        return (start - slot.start, stop - slot.start) if start < stop else (0, 0)


def layout_in_a_row(named: Named, dtype: torch.dtype | None) -> Layout:
    """Every data rank holds and steps on everything.

    Args:
        named: (logical name, trainable parameter), in the order in which they are to lie.
        dtype: of the gradients; None for that of each parameter.
    """
    slots: list[Slot] = []
    ends: dict[torch.dtype, int] = {}
    for name, parameter in named:
        of = dtype if dtype is not None else parameter.dtype
        slots.append(Slot(name, parameter, of, ends.get(of, 0)))
        ends[of] = slots[-1].stop
    return Layout(tuple(slots), ends)


@dataclass(frozen=True)
class Cut:
    """How gradients are cut over the data ranks.

    Args:
        ranks, rank: of the data axis.
        limit: elements of a bucket.
        partial: names of which tensor ranks hold parts.
        late: names that other ranks, or other stages here, add something to.
        aside: names that are added to another's, and reduced with that.
    """

    ranks: int
    rank: int
    limit: int
    partial: Collection[str] = ()
    late: Collection[str] = ()
    aside: Collection[str] = ()

    def kind(self, name: str) -> int:
        """By which slots are sorted: those of different kinds share no bucket."""
        if name in self.aside:
            return 3
        return 1 if name in self.partial else 2 if name in self.late else 0


def layout_in_buckets(named: Named, dtype: torch.dtype | None, cut: Cut) -> Layout:
    """Buckets in the order of the backward pass; a bucket has parameters of one dtype.

    Args:
        named: (logical name, trainable parameter), in the order of the model.
    """
    slots: list[Slot] = []
    buckets: list[DataBucket] = []
    ends: dict[torch.dtype, int] = {}
    groups: dict[tuple[int, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(named):
        groups.setdefault((cut.kind(name), parameter.dtype), []).append((name, parameter))
    for kind, of_parameters in sorted(groups, key=lambda key: key[0]):
        group = groups[kind, of_parameters]
        of = dtype if dtype is not None else of_parameters
        sizes = [parameter.numel() for _, parameter in group]
        # What lies aside is in no bucket: as if there were one rank, and all of it one bucket.
        ranks, limit = (1, sum(map(aligned, sizes))) if kind == 3 else (cut.ranks, cut.limit)
        for place in fill_buckets(sizes, ranks, limit, ends.get(of, 0)):
            ends[of] = place.stop
            here = tuple(
                Slot(*group[entry], of, start)
                for entry, start in zip(place.entries, place.starts, strict=True)
            )
            slots += here
            if kind != 3:
                buckets.append(DataBucket(len(buckets), of, place, here, kind == 1, late=kind > 0))
    return Layout(tuple(slots), ends, tuple(buckets), cut.rank)
