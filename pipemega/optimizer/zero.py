"""ZeRO stage 1: each data rank keeps masters and optimizer state for one slice of each parameter.

    gradients    | bucket | bucket | ..        whole on every data rank while they are summed;
                                               then reduced to the owner of each slice
    masters      one per parameter             1-D: the elements that this rank owns
    parameters   | bucket | bucket | ..        the same layout, so slices are gathered in place

A parameter lies in one bucket, so each data rank owns one contiguous slice of it, which may be
empty.  A master keeps the `Shard` of its parameter: weight decay depends on the number of its dims,
LAMB on its norm, and optimizer state is stored under its logical name.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.

ZeRO communication over the data axis: reduce-scatter of gradients, all-gather of parameters.

    gradients   | 0 | 1 | 2 |   local sums on every rank           -> the total on the owner
    parameters  | 0 | 1 | 2 |   each owner has its slice           -> every rank has all slices

All data ranks send buckets in the same order, not in the order in which they become ready, so that
collectives match by their number.

Start the reduce-scatter of a bucket during the backward pass, once its gradients are final.

The plan says which backward of a stage is its final one: in schedules with a split backward the
last W, so that no bucket is sent after an I whose weight gradients are still missing.  In a final

    B    autograd reports each parameter when its gradient is complete
    W    parameters without a weight half got their gradient in I; each other one is final when its
         last job has run

and after it all parameters of the stage are final, unused ones included.  Buckets are sent in the
same order on all data ranks; those that are not sent by then are sent at the end of the step.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.config.sections.precision_sections import Overlap
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.device_waits import wait
from pipemega.distributed.exchanges import all_reduce, recorded
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.process_groups import sends_by_gloo
from pipemega.distributed.torch_versions import all_gather_single, reduce_scatter_single
from pipemega.optimizer.gradients import (
    DataBucket,
    DataReduction,
    GradientBuffer,
    GradLayout,
    ShardingSpec,
    bucketed_layout,
    equalize_replicas,
    reduce_tied,
)
from pipemega.optimizer.masters import MasterParams, ModelParams
from pipemega.optimizer.mixed_precision import Precision
from pipemega.parameters import after_autograd, replicas_of, shard_of
from pipemega.pipeline.model.module import Stage
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard


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
    """Sums each bucket of gradients over its data ranks; each slice on its owner.

    With gloo each rank sends every owner its part, and the owner sums in the order of ranks: gloo's
    reduce-scatter is an all-reduce of a copy, which sends twice as much.  Other backends run their
    reduce-scatter in place, unless it sends another dtype.

    A bucket whose reduction needs a temporary buffer waits until the window has room for it.  With
    NCCL this wait would hold up the backward pass, so reductions in place run until `finish`.

    Args:
        gradients: laid out in buckets.
        ranks: number of data ranks, of which experts are reduced over a part.
        reduction: factors and dtype.
        window: largest number of temporary buffers of buckets in flight.
    """

    def __init__(
        self, gradients: GradientBuffer, ranks: int, reduction: DataReduction, window: int
    ) -> None:
        self._gradients, self._reduction = gradients, reduction
        self._buckets = gradients.layout.buckets
        self._before, self.after = reduction.factors(ranks)
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
        if bucket.axis.size == 1:
            return
        dtype = self._reduction.dtype
        sent = flat if dtype is None else flat.to(dtype)
        with named_collective(bucket.name, bucket.axis.ranks):
            entry = _InFlight(bucket, *_send(sent, place.share, bucket.axis))
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
        if bucket.axis.size == 1:
            return True
        device = self._gradients.flats[bucket.dtype].device
        summed_here = sends_by_gloo(bucket.axis.group, device)
        return not summed_here and self._reduction.dtype in (None, bucket.dtype)

    def _complete(self, entry: _InFlight) -> None:
        if entry.work is not None:
            wait(entry.work, entry.bucket.name, entry.bucket.axis.ranks)
        start, stop = entry.bucket.owned
        owned = self._gradients.flats[entry.bucket.dtype][start:stop]
        if entry.received.dim() == 1:
            if entry.received.data_ptr() != owned.data_ptr():
                owned.copy_(entry.received)
            return
        total, *others = entry.received.unbind()
        for part in others:
            total.add_(part)
        owned.copy_(total)


def _send(sent: Tensor, share: int, axis: Axis) -> tuple[dist.Work | None, Tensor]:
    group = axis.group
    if sends_by_gloo(group, sent.device):
        received = torch.empty_like(sent)
        start = partial(dist.all_to_all_single, received, sent, group=group, async_op=True)
        work = recorded("all_to_all", sent.nbytes, group, start)
        return work, received.view(axis.size, share)
    received = sent.narrow(0, axis.rank * share, share)
    start = partial(reduce_scatter_single, received, sent, group=group, async_op=True)
    return recorded("reduce_scatter", sent.nbytes, group, start), received


class AllGather:
    """Gathers the slices of each bucket of parameters from their owners to its data ranks.

    Args:
        buckets: the buckets, in the order of gathering.
        flats: number of a bucket -> its buffer.
        overlap: run in the background until `wait` or `wait_for`.
    """

    def __init__(
        self, buckets: Sequence[DataBucket], flats: Mapping[int, Tensor], *, overlap: bool
    ) -> None:
        self._buckets, self._flats, self._overlap = buckets, flats, overlap
        self._works: dict[int, dist.Work] = {}

    def start(self) -> None:
        """Start gathering all buckets; every data rank calls it."""
        self.wait()
        for number, bucket in enumerate(self._buckets):
            flat, axis = self._flats[bucket.number], bucket.axis
            if axis.size == 1:
                continue
            own = flat.narrow(0, axis.rank * bucket.place.share, bucket.place.share)
            with named_collective(f"the parameters of {bucket.name}", axis.ranks):
                start = partial(all_gather_single, flat, own, group=axis.group, async_op=True)
                work = recorded("all_gather", flat.nbytes, axis.group, start)
            assert work is not None
            self._works[number] = work
            if not self._overlap:
                self.wait_for((number,))

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Wait until the buckets of these indices are complete."""
        for number in numbers:
            work = self._works.pop(number, None)
            if work is not None:
                bucket = self._buckets[number]
                wait(work, f"the parameters of {bucket.name}", bucket.axis.ranks)

    def wait(self) -> None:
        """Wait until all buckets are complete."""
        if self._works:
            self.wait_for(sorted(self._works))


class BucketReadiness:
    """Tracks the gradients that each bucket still waits for; sends it when none is left.

    Args:
        gradients: laid out in buckets.
        reduce_scatter: sends the buckets.
        hooks: use autograd hooks within a final B.  Only valid if autograd brings all gradients: a
            weight half may add to a gradient after autograd has reported it.
    """

    def __init__(
        self, gradients: GradientBuffer, reduce_scatter: ReduceScatter, *, hooks: bool
    ) -> None:
        self._gradients, self._reduce_scatter = gradients, reduce_scatter
        self._early = [bucket for bucket in gradients.layout.buckets if not bucket.late]
        self._missing: list[set[int]] = []
        self._bucket_of = {
            id(slot.parameter): bucket.number for bucket in self._early for slot in bucket.slots
        }
        self._hooks_active = False
        self._hooks = hooks
        if hooks:
            for bucket in self._early:
                for slot in bucket.slots:
                    # Runs after the hook of the gradient buffer, which was registered first.
                    after_autograd(slot.parameter, self._on_autograd)

    def begin(self) -> None:
        """Begin a step: no gradient is final."""
        # Views that were replaced must be restored before anything is added to them.
        self._gradients.restore_views()
        self._missing = [{id(slot.parameter) for slot in bucket.slots} for bucket in self._early]

    @contextmanager
    def final_backward(
        self, parameters: Iterable[nn.Parameter], pending: Collection[int] | None
    ) -> Iterator[None]:
        """Return the context in which the final backward of a stage runs.

        Args:
            parameters: the parameters of the stage.
            pending: ids of the parameters whose weight half runs within the context; None in a
                whole backward.
        """
        parameters = list(parameters)
        if pending is not None:
            for parameter in parameters:
                if id(parameter) not in pending:
                    self.mark_ready(parameter)
        self._hooks_active = self._hooks and pending is None
        try:
            yield
        finally:
            self._hooks_active = False
        for parameter in parameters:
            self.mark_ready(parameter)

    def mark_ready(self, parameter: Tensor) -> None:
        """Record that the gradient of `parameter` is final; send the buckets that are complete."""
        number = self._bucket_of.get(id(parameter))
        if number is None:
            return
        self._missing[number].discard(id(parameter))
        while self._next_is_complete():
            self._reduce_scatter.start_next()

    def _next_is_complete(self) -> bool:
        number = self._reduce_scatter.started
        return number < len(self._early) and not self._missing[number]

    def _on_autograd(self, parameter: Tensor) -> None:
        if self._hooks_active:
            self.mark_ready(parameter)


# Temporary buffers of reductions with overlap: one is summed on the CPU while the next is sent.
_WINDOW = 2


class ZeroMasterParams(MasterParams):
    """Masters of the slices that this data rank owns.

    Args:
        model: the parameters of this rank; they are cast in place and moved to flat buffers.
        mesh: the axes to reduce over.
        reduce_bucket_size: most elements of a bucket, unless one parameter is larger.
        overlap: "reductions": reduce a bucket as soon as its gradients are final; "all": also
            gather parameters during the next forwards; "nothing": do both at the end of the step.
        precision: decides on masters, and on the dtype of gradients.
        reduction: how gradients are reduced over the data axis.
        host: memory to keep the masters in; None: on the device of the parameters.
    """

    def __init__(
        self,
        model: ModelParams,
        mesh: Mesh,
        *,
        reduce_bucket_size: int,
        overlap: Overlap = "nothing",
        precision: Precision | None = None,
        reduction: DataReduction | None = None,
        host: HostMemory | None = None,
    ) -> None:
        precision = precision if precision is not None else Precision()
        reduction = reduction if reduction is not None else DataReduction()
        layout = _layout(model, mesh, reduce_bucket_size, precision.accumulation_dtype)
        super().__init__(model, mesh, layout, precision, host, shard_axis=mesh.data)
        self._overlap = overlap
        self._reduce_scatter = ReduceScatter(
            self.gradients, mesh.data.size, reduction, 1 if overlap == "nothing" else _WINDOW
        )
        # As forward passes need them: late ones (embeddings, norms) first.
        order = sorted(layout.buckets, key=lambda bucket: (not bucket.late, -bucket.number))
        self._all_gather = AllGather(order, self._flat_params, overlap=overlap == "all")
        self._gather_index = {bucket.number: index for index, bucket in enumerate(order)}

    def bucket_readiness(self, *, hooks: bool) -> BucketReadiness | None:
        """Return what starts reductions during the backward passes; None without overlap.

        Args:
            hooks: autograd brings all gradients, so its hooks may report them as final.
        """
        if self._overlap == "nothing":
            return None
        return BucketReadiness(self.gradients, self._reduce_scatter, hooks=hooks)

    def register_param_waits(self, stages: Iterable[Stage | VocabularyShard]) -> None:
        """Make each layer wait for the all-gathers of its own parameters before it runs."""
        if self._overlap != "all":
            return
        logical = {slot: name for slot, name, _ in self._model.trainable_copies}
        names = {id(slot.parameter): slot.name for slot in self.gradients.slots}
        for stage in stages:
            needs: dict[int, list[int]] = {}
            for position, layer in zip(map(int, stage.layers), stage.layers.values(), strict=True):
                held = [names[id(p)] for p in layer.parameters() if id(p) in names]
                buckets = {self.layout.bucket_of[logical.get(n, n)].number for n in held}
                needs[position] = sorted(self._gather_index[number] for number in buckets)
            stage.register_layer_hook(partial(self._wait_for_layer, needs))

    def _wait_for_layer(self, needs: Mapping[int, list[int]], position: int) -> None:
        self._all_gather.wait_for(needs[position])

    def reduce(self) -> float:
        self.wait()
        self.gradients.restore_views()
        self._sum_copies()
        for bucket in self.layout.buckets:
            if bucket.partial:
                place = bucket.place
                flat = self.gradients.flats[bucket.dtype][place.start : place.stop]
                all_reduce(flat, self.mesh.tensor)
        reduce_tied(self.gradients, self._model.tied)
        self._reduce_scatter.finish()
        return self._reduce_scatter.after

    def copy_to_model(self) -> None:
        # All-gathers in flight still read the buffers.
        self.wait()
        self._copy_masters()
        self._all_gather.start()
        equalize_replicas(self._model.trainable, self._model.tied, self.wait)

    def wait(self) -> None:
        self._all_gather.wait()

    @torch.no_grad()
    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        for name in sorted(values):
            parameter = self._parameters[name]
            whole = torch.zeros(parameter.shape, dtype=values[name].dtype, device=parameter.device)
            self._slice(name, whole).copy_(values[name])
            # All other ranks add zeros, which changes no bit.
            if (axis := replicas_of(parameter, self.mesh)).size > 1:
                all_reduce(whole, axis)
            gathered[name] = whole
        return gathered


def _layout(
    model: ModelParams, mesh: Mesh, reduce_bucket_size: int, dtype: torch.dtype | None
) -> GradLayout:
    named = model.with_gradient
    sharding = ShardingSpec(
        mesh.data,
        reduce_bucket_size,
        mesh.replica,
        partial={n for n, p in named if mesh.tensor.size > 1 and shard_of(p).partial_gradient},
        late={n for n, axis in model.tied.items() if axis.size > 1}
        | {n for n, copies in model.copies.items() if copies},
        aside={slot for slot, _, _ in model.trainable_copies},
    )
    return bucketed_layout(named, dtype, sharding)
