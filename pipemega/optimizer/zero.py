"""ZeRO stage 1: each data rank has, and steps on, a slice of what the others have too.

    gradients    | bucket | bucket | ..        whole on every data rank while they add up;
                                               reduced to the owner of each slice
    targets      a piece of each parameter     1-D: what this rank owns of it, or a master of that
    parameters   | bucket | bucket | ..        laid out alike, so that a slice is gathered in place

A parameter lies whole in one bucket, so each data rank has one piece of it, maybe an empty one.
The pieces know their logical parameter: weight decay goes by its dims, LAMB by its length, and the
state of the optimizer is kept by its name.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.mesh import Axis, Mesh
from pipemega.optimizer.arrivals import BucketArrivals
from pipemega.optimizer.targets import Named, Targets
from pipemega.optimizer.traffic import Gather, Scatter
from pipemega.parameters import describe, shard_of
from pipemega.pipeline.module import Stage
from pipemega.slots import Cut, DataBucket, Layout, Slot, layout_in_buckets

# Reductions on their way at one time, each with room for what lands: one is added up while the
# next is sent.
_WINDOW = 2


class ZeroTargets(Targets):
    """What this data rank owns of each trainable parameter, or a master of that.

    Args:
        as those of `Targets`, and
        bucket_size: most elements of a bucket, unless a parameter alone is larger.
        overlap: reduce a bucket as soon as its gradients are final, and gather parameters beside
            the next forwards; otherwise both at the end of the step.
    """

    def __init__(
        self, named: Named, mesh: Mesh, *, bucket_size: int, overlap: bool = False, **others: Any
    ) -> None:
        self._bucket_size, self._overlap = bucket_size, overlap
        self._weights: dict[int, Tensor] = {}  # by the number of the bucket
        super().__init__(named, mesh, **others)
        window = _WINDOW if overlap else 1
        self._scatter = Scatter(self.gradients, mesh.data, self._reduction, window)
        order = _in_order_of_use(self.layout.buckets)
        self._gather = Gather(
            [self._weights[bucket.number] for bucket in order],
            [f"the parameters of {bucket.name}" for bucket in order],
            mesh.data,
            beside=overlap,
        )
        self._place_in_order = {bucket.number: place for place, bucket in enumerate(order)}

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        return self._spans

    @property
    def data(self) -> Axis:
        return self.mesh.data

    def arrivals(self, *, hooks: bool) -> BucketArrivals | None:
        """Who is to be told of final gradients; None where reductions wait for the end anyway.

        Args:
            hooks: autograd's own hooks may say when a gradient is final: it brings them all.
        """
        if not self._overlap:
            return None
        return BucketArrivals(self.gradients, self._scatter, hooks=hooks)

    def await_in(self, stages: Iterable[Stage]) -> None:
        """Lets each layer wait for its own parameters before it runs."""
        if not self._overlap:
            return
        home = {id(slot.parameter): slot.name for slot in self.gradients.slots}
        for stage in stages:
            needs: dict[int, tuple[int, ...]] = {}
            for position, layer in enumerate(stage.layers.values(), stage.start):
                names = [home[id(p)] for p in layer.parameters() if id(p) in home]
                needs[position] = self._buckets_of(names)
            stage.before_each_layer(self._waiting(needs))

    def _waiting(self, needs: Mapping[int, tuple[int, ...]]) -> Callable[[int], None]:
        return lambda position: self._gather.wait_for(needs[position])

    def _buckets_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Places in the order of gathering."""
        bucket_of = self.layout.bucket_of
        originals = {self._copy_of.get(name, name) for name in names}
        return tuple(sorted({self._place_in_order[bucket_of[n].number] for n in originals}))

    # From gradients

    def reduce(self) -> float:
        self.wait()
        self.gradients.attach()
        self._fold_copies()
        for bucket in self.layout.buckets:
            if bucket.partial:
                place = bucket.place
                flat = self.gradients.flats[bucket.dtype][place.start : place.stop]
                dist.all_reduce(flat, group=self.mesh.tensor.group)
        self._sum_over_holders()
        self._scatter.finish()
        return self._scatter.after

    @cached_property
    def gradient_tensors(self) -> list[Tensor]:
        owned = [
            (bucket.dtype, *bucket.place.owned_by(self.mesh.data.rank))
            for bucket in self.layout.buckets
        ]
        return [self.gradients.flats[dtype][start:stop] for dtype, start, stop in owned]

    # To parameters

    @torch.no_grad()
    def publish(self) -> None:
        # What is on its way is read by others yet.
        self._gather.wait()
        super().publish()
        self._gather.start()

    def wait(self) -> None:
        self._gather.wait()

    @torch.no_grad()
    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wholes: dict[str, Tensor] = {}
        for slot in sorted(self._slots, key=lambda slot: slot.name):
            if slot.name not in values:
                continue
            piece, (start, stop) = values[slot.name], self._spans[slot.name]
            parameter = slot.parameter
            local = torch.zeros(parameter.shape, dtype=piece.dtype, device=parameter.device)
            local.view(-1)[start:stop] = piece
            # Everybody else adds zeros, which changes no bit.
            dist.all_reduce(local, group=self.mesh.data.group)
            wholes[slot.name] = local
        return wholes

    # What slices do in other ways

    def _lay_out(self, named: Named, dtype: torch.dtype | None) -> Layout:
        data, tensor = self.mesh.data, self.mesh.tensor
        cut = Cut(
            data.size,
            data.rank,
            self._bucket_size,
            partial={n for n, p in named if tensor.size > 1 and shard_of(p).partial_gradient},
            late={*(n for n, axis in self._tied.items() if axis.size > 1), *self._copy_of.values()},
            aside=self._copy_of.keys(),
        )
        layout = layout_in_buckets(named, dtype, cut)
        self._spans = {
            slot.name: layout.span(slot) for slot in layout.slots if slot.name not in self._copy_of
        }
        return layout

    def _part(self, name: str, whole: Tensor) -> Tensor:
        start, stop = self._spans[name]
        return super()._part(name, whole.reshape(-1)[start:stop])

    @torch.no_grad()
    def _place(self) -> None:
        """One bucket after the other, so that parameters never take up twice their room."""
        for bucket in self.layout.buckets:
            first = bucket.slots[0].parameter
            flat = torch.zeros(bucket.place.size, dtype=first.dtype, device=first.device)
            for slot in bucket.slots:
                start = slot.start - bucket.place.start
                view = flat[start : start + slot.parameter.numel()].view(slot.parameter.shape)
                view.copy_(slot.parameter)
                slot.parameter.data = view
            self._weights[bucket.number] = flat

    def _computing(self, slot: Slot) -> Tensor:
        start, stop = self._spans[slot.name]
        return slot.parameter.detach().view(-1)[start:stop]

    def _gradient_of(self, slot: Slot) -> Tensor:
        start, stop = self._spans[slot.name]
        return self.gradients.view(slot.parameter).view(-1)[start:stop]

    def _target_of(self, slot: Slot) -> nn.Parameter:
        return describe(nn.Parameter(self._computing(slot)), shard_of(slot.parameter))


def _in_order_of_use(buckets: Iterable[DataBucket]) -> list[DataBucket]:
    """As forward passes want their parameters: embeddings and norms first, which come late."""
    return sorted(buckets, key=lambda bucket: (not bucket.late, -bucket.number))
