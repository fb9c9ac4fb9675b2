"""Gradient buffers of one rank, and the reductions that turn them into logical gradients.

    flat    | .. | a parameter's slot | .. |                one per dtype; see grad_layout.py
                   ^ view: where its gradient is summed

A step runs the reductions in this order: parts that tensor ranks hold of one gradient, then
replicas of tied parameters, then the data ranks.  After them every rank holds the gradients of its
shards of the logical parameters (with ZeRO, of its slices of these); grad_norm.py computes their
norm.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipemega.distributed.device_collectives import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.distributed.tied_comm import all_reduce_tied, broadcast_tied
from pipemega.optimizer.grad_layout import GradLayout, GradSlot, Named, whole_layout
from pipemega.parameters import after_autograd, shard_of


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
        dtype: to sum in; None for the dtype of each parameter.
        layout: of the flat buffers; None for `whole_layout`.
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
        """In the order of the layout."""
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
        """Return the view in which the gradient of `parameter` is summed; of its shape."""
        return self._views[id(parameter)]

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that does not come from autograd: that of a weight-gradient job."""
        if parameter.numel():
            self.view(parameter).add_(gradient)

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
        dtype: dtype that is sent (`communication_data_type`); None for that of the buffer.
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


def reduce_data(gradients: GradientBuffer, data: Axis, reduction: DataReduction) -> float:
    """Sum over the data axis: one all-reduce per flat buffer.

    Returns:
        the factor that the gradients still have to be multiplied by.  The caller merges it into
        its own multiplication of the gradients.
    """
    if data.size == 1:
        return 1.0
    before, after = reduction.factors(data.size)
    for flat in gradients.flats.values():
        if before != 1.0:
            flat.mul_(before)
        if reduction.dtype is None or reduction.dtype == flat.dtype:
            all_reduce(flat, data)
        else:
            sent = flat.to(reduction.dtype)
            all_reduce(sent, data)
            flat.copy_(sent)
    return after


@torch.no_grad()
def equalize_replicas(
    parameters: Named, tied: Mapping[str, Axis], wait: Callable[[], None] = lambda: None
) -> None:
    """Copy tied parameters from their first replica, if replicas are on different devices.

    A CPU and a GPU round the same step differently, and replicas on both would drift apart.

    Args:
        tied: as for `reduce_tied`.
        wait: called before the first copy.
    """
    mixed = {name: p for name, p in parameters if name in tied and tied[name].devices}
    if mixed:
        wait()
    for name in sorted(mixed):
        broadcast_tied(mixed[name], tied[name])
