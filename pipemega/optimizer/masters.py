"""Master parameters: the tensors that the optimizer updates.

    gradients --reduce--> gradients of logical parameters --assign_grads--> master.grad
                                                                            optimizer.step()
    model parameters <--------------copy_to_model------------------------ master

There are two strategies with the interface `MasterParams`: `PlainMasterParams` here, where every
data rank updates whole parameters, and `zero.ZeroMasterParams`, where every data rank updates one
slice of each.  Members of `MasterParams` that are not abstract serve both; none is overridden.

Offloaded masters have host buffers.  The copies between them and the device are asynchronous if
the memory is pinned.

    device                                      host
    gradients, owned ranges  ---one copy each--->  gradients, the same ranges
                                                       |  optimizer
    parameters  <---one copy each---  parameters  <--  masters
                                      only if their dtype differs from the masters' dtype
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.host_memory import CopyEvent, HostMemory
from pipemega.distributed.mesh import Axis, Mesh, gather_objects
from pipemega.errors import ConfigError
from pipemega.optimizer.gradients import (
    DataBucket,
    DataReduction,
    GradientBuffer,
    GradLayout,
    GradSlot,
    Named,
    equalize_replicas,
    equalize_tied,
    reduce_data,
    reduce_partial,
    reduce_tied,
    whole_layout,
)
from pipemega.optimizer.mixed_precision import Precision
from pipemega.optimizer.step_outcome import (
    CountedGradient,
    GradientNorms,
    StepStatistics,
    is_counted,
)
from pipemega.parameters import attach_shard, shard_of

_Shape = tuple[int, ...]


class Offload:
    """The host buffers of one rank.

    Args:
        memory: allocates and copies.
        layout: the layout of the gradients on the device.
        slots: the slots of the parameters that have a master.
        master_dtype: logical name -> dtype of the master.
        param_dtype: logical name -> dtype of the parameter in forward and backward.
    """

    def __init__(
        self,
        memory: HostMemory,
        layout: GradLayout,
        slots: Sequence[GradSlot],
        master_dtype: Mapping[str, torch.dtype],
        param_dtype: Mapping[str, torch.dtype],
    ) -> None:
        self._memory, self._layout = memory, layout
        self._uploaded: CopyEvent | None = None
        shapes = {slot.name: _shape(layout, slot) for slot in slots}
        masters = {name: (shapes[name], master_dtype[name]) for name in shapes}
        params = {
            name: (shapes[name], param_dtype[name])
            for name in shapes
            if param_dtype[name] != master_dtype[name]
        }
        grads = {s.name: masters[s.name] for s in slots if s.dtype != master_dtype[s.name]}
        ranges = [((stop - start,), dtype) for dtype, start, stop in layout.owned_ranges]
        views = iter(
            memory.empty_views([*masters.values(), *params.values(), *grads.values(), *ranges])
        )
        self.masters: dict[str, Tensor] = dict(zip(masters, views, strict=False))
        """Logical name -> the memory of the master."""
        self._params = dict(zip(params, views, strict=False))
        self._converted = dict(zip(grads, views, strict=False))
        self._ranges = list(views)
        self._received = {slot.name: self._gradient_of(slot, shapes[slot.name]) for slot in slots}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        views = [*self.masters.values(), *self._params.values(), *self._converted.values()]
        return sum(view.nbytes for view in (*views, *self._ranges))

    @torch.no_grad()
    def copy_gradients(self, owned: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copy the gradients to the host; return logical name -> gradient in the master's dtype.

        Args:
            owned: the owned ranges of the gradient buffers.
        """
        for target, source in zip(self._ranges, owned, strict=True):
            self._memory.copy(target, source)
        synchronize(self._memory.record())
        for name, converted in self._converted.items():
            converted.copy_(self._received[name])
        return self._received | self._converted

    @torch.no_grad()
    def copy_to(self, params: Mapping[str, Tensor]) -> None:
        """Start the copies from the masters to parameters on the device.

        Args:
            params: logical name -> parameter, or the slice of it that the master holds.
        """
        self.wait()
        for name, converted in self._params.items():
            converted.copy_(self.masters[name])
        for name, param in params.items():
            self._memory.copy(param, self._params.get(name, self.masters[name]))
        self._uploaded = self._memory.record()

    def wait(self) -> None:
        """Wait until the host may write to the masters: copies from them are complete."""
        if self._uploaded is not None:
            synchronize(self._uploaded)
            self._uploaded = None

    def _gradient_of(self, slot: GradSlot, shape: _Shape) -> Tensor:
        """Return the view of the received gradients that belongs to `slot`."""
        start, _ = self._layout.owned(slot)
        numel = torch.Size(shape).numel()
        for (dtype, first, last), received in zip(
            self._layout.owned_ranges, self._ranges, strict=True
        ):
            if dtype == slot.dtype and first <= start and start + numel <= last:
                return received[start - first : start - first + numel].view(shape)
        # An empty slice lies in no range.
        assert numel == 0, slot.name
        return torch.empty(shape, dtype=slot.dtype, device=self._memory.location)


def _shape(layout: GradLayout, slot: GradSlot) -> _Shape:
    """Return the shape of the master: the parameter, or the slice of it that this rank owns."""
    if not layout.buckets:
        return tuple(slot.parameter.shape)
    start, stop = layout.span(slot)
    return (stop - start,)


class FrozenParams:
    """The trainable parameters of this rank that are frozen now.

    Args:
        parameters: (logical name, parameter), copies of tied parameters too.

    Attributes:
        names: logical names of the frozen ones, since the last `update`.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters = [(name, p) for name, p in parameters if p.numel()]
        self._known = self._flags
        self._trainable = {name for name, p in self._parameters if p.requires_grad}
        self.names: frozenset[str] = frozenset()

    @property
    def _flags(self) -> list[bool]:
        return [p.requires_grad for _, p in self._parameters]

    @property
    def have_changed(self) -> bool:
        """Whether the caller has frozen or unfrozen parameters since the last `update`."""
        return self._flags != self._known

    def update(self, mesh: Mesh) -> None:
        """Let the next step leave out what is frozen now; collective over the world.

        Raises:
            ConfigError: a parameter was frozen at `initialize`, or is frozen on some ranks only;
                on every rank.
        """
        for rank, untrained in enumerate(gather_objects(self._unfrozen_since(), mesh.world)):
            if untrained:
                raise ConfigError(
                    f"{untrained} requires a gradient on rank {rank} and did not in initialize(), "
                    "so the optimizer does not have it: call initialize() while it requires a "
                    "gradient, and freeze it after that",
                    on_every_rank=True,
                )
        first: dict[str, tuple[int, bool]] = {}
        flags = [(name, p.requires_grad) for name, p in self._parameters]
        for rank, others in enumerate(gather_objects(flags, mesh.world)):
            for name, flag in others:
                before, was = first.setdefault(name, (rank, flag))
                if flag is not was:
                    raise ConfigError(
                        f"{name}: requires_grad is {was} on rank {before} and {flag} on rank "
                        f"{rank}: set the same value on all ranks and for all stages that hold it",
                        on_every_rank=True,
                    )
        self._known = self._flags
        self.names = frozenset(
            name for name, p in self._parameters if name in self._trainable and not p.requires_grad
        )

    def _unfrozen_since(self) -> str:
        names = (name for name, p in self._parameters if p.requires_grad)
        return next((name for name in names if name not in self._trainable), "")


@dataclass(frozen=True)
class ModelParams:
    """The parameters of one rank's part of the model.

    Args:
        named: (logical name, parameter), each parameter once.
        tied: logical name -> the ranks that hold a replica of a tied parameter.
        copies: logical name -> the same tied parameter in later stages of this rank.  Copies are
            separate `nn.Parameter` objects: they get the storage of the first one, and their
            gradients are added to its gradient.
        num_layers: number of layers of the whole model; larger than any position in a logical
            name.
    """

    named: Named
    tied: Mapping[str, Axis] = field(default_factory=dict)
    copies: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)
    num_layers: int = 1

    @property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that need a gradient, without copies and without empty parameters.

        No step changes an empty one, and no checkpoint would have its optimizer state.
        """
        return [(name, p) for name, p in self.named if p.requires_grad and p.numel()]

    @property
    def trainable_copies(self) -> list[tuple[str, str, nn.Parameter]]:
        """(slot name of the copy, logical name, copy) of the copies that need a gradient."""
        return [
            (f"{name} (copy {number})", name, copy)
            for name, copies in self.copies.items()
            for number, copy in enumerate(copies, 1)
            if copy.requires_grad and copy.numel()
        ]

    @property
    def with_copies(self) -> list[tuple[str, nn.Parameter]]:
        """(logical name, parameter) of all parameters and copies."""
        return [*self.named, *((name, copy) for name in self.copies for copy in self.copies[name])]

    @property
    def with_gradient(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters and copies under their slot names."""
        return [*self.trainable, *((slot, copy) for slot, _, copy in self.trainable_copies)]

    def share_storage(self) -> None:
        """Give every copy the storage of the first parameter of its name."""
        parameters = dict(self.named)
        for name, copies in self.copies.items():
            for copy in copies:
                copy.data = parameters[name].data


class _Master(NamedTuple):
    """One master and the tensors that belong to it, all of the same shape.

    Args:
        name: logical name.
        param: the model parameter, or the slice of it that this data rank updates.
        grad: the gradient in the gradient buffer.
        tensor: what the optimizer updates.
        separate: it has storage other than `param`, and `param` is copied from it.
    """

    name: str
    param: Tensor
    grad: Tensor
    tensor: nn.Parameter
    separate: bool


class MasterParams(ABC):
    """The masters of one rank, and the copies between them, gradients and model parameters.

    Args:
        model: the parameters of this rank; they are cast in place.
        mesh: the axes to reduce over.
        layout: the layout of the gradients.  A layout with buckets says that each data rank
            updates one slice of every bucket: masters are 1-D slices then, and parameters are
            moved to flat buffers of the same layout.
        precision: decides on masters, and on the dtype of gradients.
        host: memory to keep the masters in; None: on the device of the parameters.
        shard_axis: the data ranks that hold the other slices of each master; None where masters
            are whole.
    """

    def __init__(
        self,
        model: ModelParams,
        mesh: Mesh,
        layout: GradLayout,
        precision: Precision,
        host: HostMemory | None,
        shard_axis: Axis | None = None,
    ) -> None:
        self.mesh, self.layout, self.shard_axis = mesh, layout, shard_axis
        self._model, self.num_layers = model, model.num_layers
        self.frozen = FrozenParams(model.with_copies)
        """Parameters whose masters get no gradient, so that the optimizer leaves them out."""
        self._parameters = dict(model.named)
        self.spans: dict[str, tuple[int, int]] | None = (
            None if shard_axis is None else {s.name: layout.span(s) for s in layout.slots}
        )
        """Logical name -> [start, stop) of the flattened parameter that the master holds.

        None where masters are whole.
        """
        slots = {slot.name: slot for slot in layout.slots}
        if host is not None:
            # The views of the host's flat buffers are contiguous.
            for _, parameter in model.named:
                parameter.data = parameter.data.contiguous()
        self.offload = None if host is None else _offload(host, layout, model, precision)
        """Host buffers of the masters; None where they are on the device."""
        copies = precision.cast_parameters(model.named, self._master_values)
        self._flat_params = _move_to_buckets(layout.buckets)
        model.share_storage()
        self.gradients = GradientBuffer(
            model.with_gradient, dtype=precision.accumulation_dtype, layout=layout
        )
        self.gradient_tensors = [
            self.gradients.flats[dtype][start:stop] for dtype, start, stop in layout.owned_ranges
        ]
        """The gradients that this rank is responsible for after `reduce`."""
        self.saved_masters = frozenset(copies)
        """Names of masters of a higher precision than the parameter: saved in checkpoints."""
        self._masters = {
            name: self._master(slots[name], copies.get(name)) for name, _ in model.trainable
        }
        self.named = {name: master.tensor for name, master in self._masters.items()}
        """Logical name -> master, in the order of the model."""

    # Gradients to masters

    @abstractmethod
    def reduce(self) -> float:
        """Reduce the gradients over the tensor axis, tied replicas and the data axis.

        Returns:
            the factor that the gradients still have to be multiplied by.
        """

    def gradient_norms(self) -> GradientNorms:
        """Return what computes this rank's part of the squared norms, after `reduce`."""
        mesh = self.mesh
        return GradientNorms(self.gradients, mesh, self._model.tied, self.num_layers)

    def statistics(self, *, params_norm: bool, num_zeros: bool) -> StepStatistics | None:
        """Return what computes this rank's part of the numbers for the log; None: nothing to do."""
        if not (params_norm or num_zeros):
            return None
        frozen = [(name, p) for name, p in self._model.named if not p.requires_grad]
        params = [tensor for name, tensor in self.named.items() if self._counts(name)]
        params += [p for name, p in frozen if self._counts(name, sliced=False)]
        gradients = [self._counted_gradient(s) for s in self.layout.slots if self._counts(s.name)]
        return StepStatistics(
            params if params_norm else None, gradients if num_zeros else None, self.mesh.device
        )

    def _counts(self, name: str, *, sliced: bool | None = None) -> bool:
        """Return whether this rank counts what it holds of a logical parameter."""
        if name not in self._parameters:
            return False  # the gradient of a copy, which was added to the first one's gradient
        sliced = self.spans is not None if sliced is None else sliced
        parameter, tied = self._parameters[name], self._model.tied
        return is_counted(name, parameter, self.mesh, tied, sliced=sliced)

    def _counted_gradient(self, slot: GradSlot) -> CountedGradient:
        parameter, (start, stop) = slot.parameter, self.layout.span(slot)
        gradient = self.gradients.view(parameter).reshape(-1)[start:stop]
        padding = shard_of(parameter).padding(tuple(parameter.shape), start, stop)
        return CountedGradient(gradient, padding)

    def assign_grads(self, factor: float) -> None:
        """Multiply the gradients by `factor` and set the `grad` of each master.

        `grad` is a view of the gradient buffer if the dtypes agree, else a copy; with offload a
        view of a host buffer.
        """
        if factor != 1.0:
            for gradient in self.gradient_tensors:
                gradient.mul_(factor)
        if self.offload is not None:
            received = self.offload.copy_gradients(self.gradient_tensors)
            for name, master in self.named.items():
                master.grad = received[name]
        else:
            for _, _, grad, master, _ in self._masters.values():
                master.grad = grad if grad.dtype == master.dtype else grad.to(master.dtype)
        for name in self.frozen.names:
            self.named[name].grad = None

    def release_grads(self) -> None:
        """Free the copies that `assign_grads` made on the compute device."""
        for _, _, grad, master, _ in self._masters.values():
            if master.dtype != grad.dtype and self.offload is None:
                master.grad = None

    # Masters to model parameters

    @abstractmethod
    def copy_to_model(self) -> None:
        """Copy the masters to the model parameters, on all data ranks.

        Collective over the holders of a tied parameter, if they are on different devices.
        """

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """After loading, make parameters and masters agree.

        Masters that are not saved take the loaded parameters; parameters take the others.
        """
        for name, param, _, master, _ in self._separate:
            if name not in self.saved_masters:
                master.copy_(param)
        self.copy_to_model()

    @abstractmethod
    def wait(self) -> None:
        """Wait until all model parameters are complete."""

    def wait_for_offload(self) -> None:
        """Wait until the host may write to offloaded masters: copies from them are complete."""
        if self.offload is not None:
            self.offload.wait()

    @abstractmethod
    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the local parameters' shapes, from tensors with the masters' shapes.

        Collective over the data axis, for experts over the data ranks with the same ones.
        """

    def gather_masters(self) -> dict[str, Tensor]:
        """Return logical name -> saved master in the parameter's shape; collective as `gather`."""
        return self.gather({name: self.named[name].detach() for name in self.saved_masters})

    # Shared by the strategies

    @torch.no_grad()
    def _copy_masters(self) -> None:
        separate = self._separate
        if self.offload is not None:
            self.offload.copy_to({master.name: master.param for master in separate})
        elif separate:
            torch._foreach_copy_([m.param for m in separate], [m.tensor for m in separate])

    @property
    def _separate(self) -> list[_Master]:
        """Masters that do not share storage with their parameter."""
        return [m for m in self._masters.values() if m.separate]

    def _sum_copies(self) -> None:
        """Add the gradient of each copy of a tied parameter to the first one's, and zero it."""
        for _, name, copy in self._model.trainable_copies:
            gradient = self.gradients.view(copy)
            self.gradients.view(self._parameters[name]).add_(gradient)
            gradient.zero_()

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        """Return the elements of a parameter-shaped tensor that the master holds.

        A view, unless `tensor` is not contiguous.
        """
        if self.spans is None:
            return tensor
        start, stop = self.spans[name]
        return tensor.reshape(-1)[start:stop]

    def _master_values(self, name: str, values: Tensor) -> Tensor:
        """Return the values that a master is to hold: in its memory if that is on the host."""
        values = self._slice(name, values)
        if self.offload is None or name not in self.offload.masters:
            return values
        return self.offload.masters[name].copy_(values)

    def _master(self, slot: GradSlot, copy: nn.Parameter | None) -> _Master:
        """Collect the tensors of one master.

        Args:
            copy: the master of higher precision; None where the precision makes none.
        """
        name, parameter = slot.name, slot.parameter
        param = parameter if self.spans is None else self._slice(name, parameter.detach())
        grad = self._slice(name, self.gradients.view(parameter))
        if copy is not None:
            return _Master(name, param, grad, copy, separate=True)
        if self.offload is not None:
            own = self._master_values(name, parameter.detach())
            master = attach_shard(nn.Parameter(own), shard_of(parameter))
            return _Master(name, param, grad, master, separate=True)
        if not isinstance(param, nn.Parameter):
            param = attach_shard(nn.Parameter(param), shard_of(parameter))
        return _Master(name, param, grad, param, separate=False)


class PlainMasterParams(MasterParams):
    """Masters of whole parameters: every data rank reduces and updates all of its parameters.

    Args:
        model: the parameters of this rank; they are cast in place.
        mesh: the axes to reduce over.
        precision: decides on masters, and on the dtype of gradients.
        reduction: how gradients are reduced over the data axis.
        host: memory to keep the masters in; None: on the device of the parameters.
    """

    def __init__(
        self,
        model: ModelParams,
        mesh: Mesh,
        *,
        precision: Precision | None = None,
        reduction: DataReduction | None = None,
        host: HostMemory | None = None,
    ) -> None:
        precision = precision if precision is not None else Precision()
        layout = whole_layout(model.with_gradient, precision.accumulation_dtype)
        super().__init__(model, mesh, layout, precision, host)
        self._reduction = reduction if reduction is not None else DataReduction()

    def reduce(self) -> float:
        self.gradients.restore_views()
        self._sum_copies()
        reduce_partial(self.gradients, self.mesh.tensor)
        reduce_tied(self.gradients, self._model.tied)
        factor = reduce_data(self.gradients, self.mesh.data, self._reduction, self.mesh.replica)
        equalize_tied(self.gradients, self._model.tied, self.mesh.data)
        return factor

    def copy_to_model(self) -> None:
        self._copy_masters()
        equalize_replicas(self._model.trainable, self._model.tied)

    def wait(self) -> None:
        """Return at once: no copy is asynchronous."""

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)


def _offload(
    memory: HostMemory, layout: GradLayout, model: ModelParams, precision: Precision
) -> Offload:
    trainable = dict(model.trainable)
    return Offload(
        memory,
        layout,
        [slot for slot in layout.slots if slot.name in trainable],
        {name: precision.master_dtype_of(parameter) for name, parameter in trainable.items()},
        {name: precision.param_dtype_of(parameter) for name, parameter in trainable.items()},
    )


@torch.no_grad()
def _move_to_buckets(buckets: Sequence[DataBucket]) -> dict[int, Tensor]:
    """Move parameters to one flat buffer per bucket; return the buffers by bucket number.

    One bucket at a time, so that at most one bucket of parameters exists twice.
    """
    flats: dict[int, Tensor] = {}
    for bucket in buckets:
        first = bucket.slots[0].parameter
        flat = torch.zeros(bucket.place.size, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            start = slot.start - bucket.place.start
            view = flat[start : start + slot.parameter.numel()].view(slot.parameter.shape)
            view.copy_(slot.parameter)
            slot.parameter.data = view
        flats[bucket.number] = flat
    return flats
