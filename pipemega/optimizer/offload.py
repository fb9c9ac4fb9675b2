"""Host buffers of offloaded masters, and the copies between them and the device.

    device                                      host
    gradients, owned ranges  ---one copy each--->  gradients, the same ranges
                                                       |  optimizer
    parameters  <---one copy each---  parameters  <--  masters
                                      only if their dtype is not that of the masters

The copies are asynchronous if the memory is pinned.  The host waits twice per step: for all
gradients, and for all parameters before it writes to the buffers again.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.host_memory import CopyEvent, HostMemory
from pipemega.optimizer.grad_layout import GradLayout, GradSlot

_Shape = tuple[int, ...]


class Offload:
    """The host buffers of one rank.

    Args:
        memory: allocates and copies.
        layout: of the gradients on the device.
        slots: of the parameters that have a master.
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
    """Return the shape of the master: of the parameter, or of the slice that this rank owns."""
    if not layout.buckets:
        return tuple(slot.parameter.shape)
    start, stop = layout.span(slot)
    return (stop - start,)
