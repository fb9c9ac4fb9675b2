"""Buckets on their way between data ranks: gradients to their owners, parameters back to all.

    gradients   | 0 | 1 | 2 |   every rank has sums of its own     -> each owner has its slice
    parameters  | 0 | 1 | 2 |   each owner has its slice           -> every rank has all

Buckets are sent in one order on all data ranks, whatever order they become ready in: a collective
meets the one of the same number.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import PipelineError
from pipemega.gradients import DataReduction, GradientBuffer
from pipemega.meetings import brief
from pipemega.mesh import Axis
from pipemega.slots import DataBucket

# Their names from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Says of a lost connection what was on its way."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(f"{what} did not get through: {brief(str(error))}") from error


@dataclass(frozen=True, eq=False)
class _Flying:
    """A bucket of gradients between its start and its end.

    Args:
        landed: from each rank its part of the slice that is owned here [ranks, share]; or, where
            the backend adds up, the sum [share].
    """

    bucket: DataBucket
    work: dist.Work | None
    landed: Tensor


class Scatter:
    """Sums each bucket of gradients over the data ranks, the slices on their owners.

    On a CPU each rank sends every owner its part, and the owner adds up in the order of ranks:
    gloo's own reduce-scatter is an all-reduce of a copy, which sends twice as much. On other
    devices it is the backend's, in place.

    Args:
        gradients: laid out in buckets.
        data: the data axis, of two ranks at least.
        reduction: factors and dtype.
        window: buckets that may be on their way at one time; each takes room for what lands.
    """

    def __init__(
        self, gradients: GradientBuffer, data: Axis, reduction: DataReduction, window: int
    ) -> None:
        self._gradients, self._data, self._reduction = gradients, data, reduction
        self._buckets = gradients.layout.buckets
        self._before, self.after = reduction.factors(data.size)
        self._window = window
        self._flying: deque[_Flying] = deque()
        self.started = 0
        """Buckets of this step whose reduction has begun."""

    def start_next(self) -> None:
        """Begins with the next bucket, whose gradients are final on this rank."""
        while len(self._flying) >= self._window:
            self._land()
        bucket = self._buckets[self.started]
        self.started += 1
        place = bucket.place
        flat = self._gradients.flats[bucket.dtype][place.start : place.stop]
        if self._before != 1.0:
            flat.mul_(self._before)
        dtype = self._reduction.dtype
        sent = flat if dtype is None else flat.to(dtype)
        with _naming(bucket.name):
            self._flying.append(_Flying(bucket, *self._send(sent, place.share)))

    def finish(self) -> None:
        """Sends what is left; every slice owned here holds its sum."""
        while self.started < len(self._buckets):
            self.start_next()
        while self._flying:
            self._land()
        self.started = 0

    def _send(self, sent: Tensor, share: int) -> tuple[dist.Work | None, Tensor]:
        group = self._data.group
        if sent.device.type == "cpu":
            landed = torch.empty_like(sent)
            work = dist.all_to_all_single(landed, sent, group=group, async_op=True)
            return work, landed.view(self._data.size, share)
        landed = sent.narrow(0, self._data.rank * share, share)
        return _reduce_scatter(landed, sent, group=group, async_op=True), landed

    def _land(self) -> None:
        flying = self._flying.popleft()
        with _naming(flying.bucket.name):
            if flying.work is not None:
                flying.work.wait()
        start, stop = flying.bucket.place.owned_by(self._data.rank)
        owned = self._gradients.flats[flying.bucket.dtype][start:stop]
        if flying.landed.dim() == 1:
            if flying.landed.data_ptr() != owned.data_ptr():
                owned.copy_(flying.landed)
            return
        total, *others = flying.landed.unbind()
        for part in others:
            total.add_(part)
        owned.copy_(total)


class Gather:
    """Brings the slices of each bucket of parameters from their owners to all data ranks.

    Args:
        flats: of the buckets, in the order in which they shall go.
        names: of them, for messages.
        data: the data axis.
        beside: let it run beside what comes next, until somebody waits.
    """

    def __init__(
        self, flats: Sequence[Tensor], names: Sequence[str], data: Axis, *, beside: bool
    ) -> None:
        self._flats, self._names, self._data, self._beside = flats, names, data, beside
        self._works: dict[int, dist.Work] = {}

    def start(self) -> None:
        """Begins with all; every data rank calls it."""
        self.wait()
        for number, flat in enumerate(self._flats):
            share = flat.numel() // self._data.size
            own = flat.narrow(0, self._data.rank * share, share)
            with _naming(self._names[number]):
                work = _all_gather(flat, own, group=self._data.group, async_op=True)
            assert work is not None
            self._works[number] = work
            if not self._beside:
                self.wait_for((number,))

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Returns when these, by their place in the order, are whole."""
        for number in numbers:
            work = self._works.pop(number, None)
            if work is not None:
                with _naming(self._names[number]):
                    work.wait()

    def wait(self) -> None:
        """Returns when all are whole."""
        if self._works:
            self.wait_for(sorted(self._works))
