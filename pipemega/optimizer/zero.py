"""ZeRO stage 1: each data rank keeps masters and optimizer state for one slice of each parameter.

    gradients    | bucket | bucket | ..        whole on every data rank while they are summed;
                                               then reduced to the owner of each slice
    masters      one per parameter             1-D: the elements that this rank owns
    parameters   | bucket | bucket | ..        the same layout, so slices are gathered in place

A parameter lies in one bucket, so each data rank owns one contiguous slice of it, which may be
empty.  A master keeps the `Shard` of its parameter: weight decay depends on the number of its dims,
LAMB on its norm, and optimizer state is stored under its logical name.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from pipemega.distributed.device_collectives import all_reduce
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer.grad_layout import GradLayout, ShardingSpec, bucketed_layout
from pipemega.optimizer.grad_ready import BucketReadiness
from pipemega.optimizer.gradients import DataReduction, equalize_replicas, reduce_tied
from pipemega.optimizer.master_params import MasterParams, ModelParams
from pipemega.optimizer.mixed_precision import Precision
from pipemega.optimizer.zero_comm import AllGather, ReduceScatter
from pipemega.parameters import shard_of
from pipemega.pipeline.module import Stage
from pipemega.pipeline.vocabulary_shard import VocabularyShard

# Temporary buffers of reductions with overlap: one is summed on the CPU while the next is sent.
_WINDOW = 2


class ZeroMasterParams(MasterParams):
    """Masters of the slices that this data rank owns.

    Args:
        model: its parameters are cast in place and moved to flat buffers.
        mesh: the axes to reduce over.
        reduce_bucket_size: most elements of a bucket, unless one parameter is larger.
        overlap: reduce a bucket as soon as its gradients are final, and gather parameters during
            the next forwards; otherwise do both at the end of the step.
        precision: decides on masters, and on the dtype of gradients.
        reduction: over the data axis.
        host: memory to keep the masters in; None: on the device of the parameters.
    """

    def __init__(
        self,
        model: ModelParams,
        mesh: Mesh,
        *,
        reduce_bucket_size: int,
        overlap: bool = False,
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
            self.gradients, mesh.data, reduction, _WINDOW if overlap else 1
        )
        # As forward passes need them: late ones (embeddings, norms) first.
        order = sorted(layout.buckets, key=lambda bucket: (not bucket.late, -bucket.number))
        self._all_gather = AllGather(
            [self._flat_params[bucket.number] for bucket in order],
            [f"the parameters of {bucket.name}" for bucket in order],
            mesh.data,
            overlap=overlap,
        )
        self._gather_index = {bucket.number: index for index, bucket in enumerate(order)}

    def bucket_readiness(self, *, hooks: bool) -> BucketReadiness | None:
        """Return what starts reductions during the backward passes; None without overlap.

        Args:
            hooks: autograd brings all gradients, so its hooks may report them as final.
        """
        if not self._overlap:
            return None
        return BucketReadiness(self.gradients, self._reduce_scatter, hooks=hooks)

    def register_param_waits(self, stages: Iterable[Stage | VocabularyShard]) -> None:
        """Make each layer wait for the all-gathers of its own parameters before it runs."""
        if not self._overlap:
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
            all_reduce(whole, self.mesh.data)
            gathered[name] = whole
        return gathered


def _layout(
    model: ModelParams, mesh: Mesh, reduce_bucket_size: int, dtype: torch.dtype | None
) -> GradLayout:
    named = model.with_gradient
    sharding = ShardingSpec(
        mesh.data.size,
        mesh.data.rank,
        reduce_bucket_size,
        partial={n for n, p in named if mesh.tensor.size > 1 and shard_of(p).partial_gradient},
        late={n for n, axis in model.tied.items() if axis.size > 1}
        | {n for n, copies in model.copies.items() if copies},
        aside={slot for slot, _, _ in model.trainable_copies},
    )
    return bucketed_layout(named, dtype, sharding)
