"""ZeRO communication over the data axis: reduce-scatter of gradients, all-gather of parameters.

    gradients   | 0 | 1 | 2 |   local sums on every rank           -> the total on the owner
    parameters  | 0 | 1 | 2 |   each owner has its slice           -> every rank has all slices

All data ranks send buckets in the same order, not in the order in which they become ready, so that
collectives match by their number.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.backends import sends_by_gloo
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.comm_recorder import recorded
from pipemega.distributed.device_waits import wait
from pipemega.distributed.mesh import Axis
from pipemega.distributed.torch_versions import all_gather_single, reduce_scatter_single
from pipemega.optimizer.grad_layout import DataBucket
from pipemega.optimizer.gradients import DataReduction, GradientBuffer


@dataclass(frozen=True, eq=False)
class _InFlight:
    """The reduce-scatter of one bucket, between start and completion.

    Args:
        received: each rank's part of the slice that this rank owns [ranks, share]; or, where the
            backend sums, the sum [share].
    """

    bucket: DataBucket
    work: dist.Work | None
    received: Tensor


class ReduceScatter:
    """Sums each bucket of gradients over the data ranks; each slice on its owner.

    With gloo each rank sends every owner its part, and the owner sums in the order of ranks: gloo's
    reduce-scatter is an all-reduce of a copy, which sends twice as much.  Other backends run their
    reduce-scatter in place, unless it sends another dtype.

    A bucket whose reduction needs a temporary buffer waits until the window has room for it.  With
    NCCL this wait would hold up the backward pass, so reductions in place run until `finish`.

    Args:
        gradients: laid out in buckets.
        data: the data axis, of at least two ranks.
        reduction: factors and dtype.
        window: largest number of temporary buffers of buckets in flight.
    """

    def __init__(
        self, gradients: GradientBuffer, data: Axis, reduction: DataReduction, window: int
    ) -> None:
        self._gradients, self._data, self._reduction = gradients, data, reduction
        self._buckets = gradients.layout.buckets
        self._before, self.after = reduction.factors(data.size)
        self._window = window
        self._in_flight: deque[_InFlight] = deque()
        self._in_place: list[_InFlight] = []
        self.started = 0
        """Number of buckets of this step whose reduction has started."""

    def start_next(self) -> None:
        """Start the next bucket, whose gradients are final on this rank."""
        bucket = self._buckets[self.started]
        in_place = self._runs_in_place(bucket)
        while not in_place and len(self._in_flight) >= self._window:
            self._complete(self._in_flight.popleft())
        self.started += 1
        place = bucket.place
        flat = self._gradients.flats[bucket.dtype][place.start : place.stop]
        if self._before != 1.0:
            flat.mul_(self._before)
        dtype = self._reduction.dtype
        sent = flat if dtype is None else flat.to(dtype)
        with named_collective(bucket.name, self._data.ranks):
            entry = _InFlight(bucket, *self._send(sent, place.share))
        (self._in_place if in_place else self._in_flight).append(entry)

    def finish(self) -> None:
        """Start the remaining buckets and wait until this rank's slices hold their sums."""
        while self.started < len(self._buckets):
            self.start_next()
        for entry in (*self._in_place, *self._in_flight):
            self._complete(entry)
        self._in_place.clear()
        self._in_flight.clear()
        self.started = 0

    def _runs_in_place(self, bucket: DataBucket) -> bool:
        """Return whether the reduction reads and writes only the buffer of the gradients."""
        summed_here = self._is_summed_by_owner(self._gradients.flats[bucket.dtype])
        return not summed_here and self._reduction.dtype in (None, bucket.dtype)

    def _is_summed_by_owner(self, tensor: Tensor) -> bool:
        return sends_by_gloo(self._data.group, tensor.device)

    def _send(self, sent: Tensor, share: int) -> tuple[dist.Work | None, Tensor]:
        group = self._data.group
        if self._is_summed_by_owner(sent):
            received = torch.empty_like(sent)
            start = partial(dist.all_to_all_single, received, sent, group=group, async_op=True)
            work = recorded("all_to_all", sent.nbytes, group, start)
            return work, received.view(self._data.size, share)
        received = sent.narrow(0, self._data.rank * share, share)
        start = partial(reduce_scatter_single, received, sent, group=group, async_op=True)
        return recorded("reduce_scatter", sent.nbytes, group, start), received

    def _complete(self, entry: _InFlight) -> None:
        if entry.work is not None:
            wait(entry.work, entry.bucket.name, self._data.ranks)
        start, stop = entry.bucket.place.owned_by(self._data.rank)
        owned = self._gradients.flats[entry.bucket.dtype][start:stop]
        if entry.received.dim() == 1:
            if entry.received.data_ptr() != owned.data_ptr():
                owned.copy_(entry.received)
            return
        total, *others = entry.received.unbind()
        for part in others:
            total.add_(part)
        owned.copy_(total)


class AllGather:
    """Gathers the slices of each bucket of parameters from their owners to all data ranks.

    Args:
        flats: buffers of the buckets, in the order of gathering.
        names: of the buckets, for messages.
        data: the data axis.
        overlap: run in the background until `wait` or `wait_for`.
    """

    def __init__(
        self, flats: Sequence[Tensor], names: Sequence[str], data: Axis, *, overlap: bool
    ) -> None:
        self._flats, self._names, self._data, self._overlap = flats, names, data, overlap
        self._works: dict[int, dist.Work] = {}

    def start(self) -> None:
        """Start gathering all buckets; every data rank calls it."""
        self.wait()
        for number, flat in enumerate(self._flats):
            share = flat.numel() // self._data.size
            own = flat.narrow(0, self._data.rank * share, share)
            with named_collective(self._names[number], self._data.ranks):
                start = partial(all_gather_single, flat, own, group=self._data.group, async_op=True)
                work = recorded("all_gather", flat.nbytes, self._data.group, start)
            assert work is not None
            self._works[number] = work
            if not self._overlap:
                self.wait_for((number,))

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Wait until the buckets of these indices are complete."""
        for number in numbers:
            work = self._works.pop(number, None)
            if work is not None:
                wait(work, self._names[number], self._data.ranks)

    def wait(self) -> None:
        """Wait until all buckets are complete."""
        if self._works:
            self.wait_for(sorted(self._works))
