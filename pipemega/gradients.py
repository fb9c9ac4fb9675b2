"""The gradients of one rank in flat buffers, and how they become those of the unsplit model.

    flat    | .. | a parameter's slot | .. |                one per dtype; slots.py lays them out
                   ^ view: where its gradient is summed up

A step goes through the reductions in the order in which they stand below: the parts that tensor
ranks hold of one gradient, then the copies of tied parameters, then the data ranks.  After them
every rank holds the gradients of its shards of the logical parameters (with ZeRO, of its slices of
those), and the squared norm counts each of them once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.errors import ConfigError
from pipemega.mesh import Axis
from pipemega.parameters import shard_of
from pipemega.slots import Layout, Named, Slot, layout_in_a_row
from pipemega.ties import sum_over_holders

# Elements of a flat buffer that are turned to fp64 at a time on a CPU; they stay in the cache.
_NORM_BLOCK = 1 << 18
# The same on other devices: 128 MiB of fp64, where the whole would be twice the gradients.
_DEVICE_NORM_BLOCK = 1 << 24


class GradientBuffer:
    """One flat buffer per dtype, with a view for each trainable parameter.

    Where buffer and parameter agree in dtype `parameter.grad` is the view, and autograd adds to
    it in place.  Otherwise a hook adds what autograd gives to the view, and drops it.  Either way
    gradients add up in the order of the backward passes.  A parameter that gets no gradient keeps
    zeros, which an optimizer takes as a gradient of zero.

    A `grad` set to None by others (`optimizer.zero_grad()`) says that what was summed up is not
    wanted: `attach` takes it so.

    Args:
        named_parameters: (logical name, parameter), each parameter once; those that need no
            gradient are left out.
        dtype: to sum up in; None for the dtype of each parameter.
        device: of the buffers; None for that of the parameters.
        layout: of the flats; None to lay all of it out for a rank that steps on everything.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        layout: Layout | None = None,
    ) -> None:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.layout = layout if layout is not None else whole_layout(named, dtype)
        self.slots: tuple[Slot, ...] = self.layout.slots
        """In the order of the layout."""
        self.flats: dict[torch.dtype, Tensor] = {}
        """The buffers: [elements]."""
        for slot in self.slots:
            if slot.dtype not in self.flats:
                where = device if device is not None else slot.parameter.device
                self.flats[slot.dtype] = torch.zeros(
                    self.layout.sizes[slot.dtype], dtype=slot.dtype, device=where
                )
        self._views = {
            id(s.parameter): self.flats[s.dtype][s.start : s.end].view(s.parameter.shape)
            for s in self.slots
        }
        for slot in self.slots:
            if not self._in_place(slot):
                slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._take_gradient
                )
        self._hang_in()

    def view(self, parameter: nn.Parameter) -> Tensor:
        """Where the gradient of `parameter` is summed up; of its shape."""
        return self._views[id(parameter)]

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds a gradient that autograd does not bring: that of a weight-gradient job."""
        self.view(parameter).add_(gradient)

    def zero(self) -> None:
        """Forgets all gradients, for the next step."""
        for flat in self.flats.values():
            flat.zero_()
        self._hang_in()

    def attach(self) -> None:
        """Takes back a `grad` that was set to None or replaced since the buffer was zeroed."""
        for slot in self.slots:
            gradient, view = slot.parameter.grad, self.view(slot.parameter)
            if not self._in_place(slot) or gradient is view:
                continue
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            slot.parameter.grad = view

    def _in_place(self, slot: Slot) -> bool:
        return slot.dtype == slot.parameter.dtype

    def _hang_in(self) -> None:
        for slot in self.slots:
            in_place = self._in_place(slot)
            slot.parameter.grad = self.view(slot.parameter) if in_place else None

    def _take_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._views[id(parameter)].add_(parameter.grad)
        parameter.grad = None


def whole_layout(named: Named, dtype: torch.dtype | None) -> Layout:
    """For a rank that steps on everything; what is reduced or counted alike lies side by side."""

    def kind(parameter: nn.Parameter) -> int:
        shard = shard_of(parameter)
        return 2 if shard.dim is not None else 0 if shard.partial_gradient else 1

    return layout_in_a_row(sorted(named, key=lambda item: kind(item[1])), dtype)


@dataclass(frozen=True)
class DataReduction:
    """How gradients are put together over the data ranks.

    Args:
        op: "mean" or "sum" (`gradient_allreduce_op`).
        prescale: divide by the number of ranks before, not after (`prescale_gradients`).
        predivide_factor: divide by this before, and make up for it after.
        dtype: sent in this dtype (`communication_data_type`); None for that of the buffer.

    Raises:
        ConfigError: the factor is not above 0.
    """

    op: Literal["mean", "sum"] = "mean"
    prescale: bool = False
    predivide_factor: float = 1.0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.predivide_factor > 0:
            raise ConfigError(
                f"gradient_predivide_factor is {self.predivide_factor}: it must be above 0"
            )

    def factors(self, size: int) -> tuple[float, float]:
        """What gradients are multiplied by before and after they are summed over `size` ranks."""
        before = 1 / size if self.prescale else 1 / self.predivide_factor
        if self.op == "sum":
            return before, float(size) if self.prescale else self.predivide_factor
        return before, 1.0 if self.prescale else self.predivide_factor / size


def reduce_partial(gradients: GradientBuffer, tensor: Axis) -> None:
    """Sums over the tensor axis what each of its ranks saw only a part of: one all-reduce."""
    if tensor.size == 1:
        return
    ends: dict[torch.dtype, int] = {}
    for slot in gradients.slots:
        if shard_of(slot.parameter).partial_gradient:
            ends[slot.dtype] = slot.stop
    for dtype, end in ends.items():
        dist.all_reduce(gradients.flats[dtype][:end], group=tensor.group)


def reduce_tied(gradients: GradientBuffer, tied: Mapping[str, Axis]) -> None:
    """Sums the gradients of tied parameters over the pipeline ranks that hold a copy.

    Args:
        tied: logical name -> the ranks that hold it; entries of other ranks do no harm.
    """
    # By name: ranks that share several tied parameters must meet for them in one order.
    for slot in sorted(gradients.slots, key=lambda slot: slot.name):
        axis = tied.get(slot.name)
        if axis is not None and axis.size > 1:
            sum_over_holders(gradients.view(slot.parameter), axis)


def reduce_data(gradients: GradientBuffer, data: Axis, reduction: DataReduction) -> float:
    """Sums over the data axis: one all-reduce per flat.

    Returns:
        the factor that the gradients still have to be multiplied by.  The caller folds it into
        the pass that it makes over them anyway.
    """
    if data.size == 1:
        return 1.0
    before, after = reduction.factors(data.size)
    for flat in gradients.flats.values():
        if before != 1.0:
            flat.mul_(before)
        if reduction.dtype is None or reduction.dtype == flat.dtype:
            dist.all_reduce(flat, group=data.group)
        else:
            sent = flat.to(reduction.dtype)
            dist.all_reduce(sent, group=data.group)
            flat.copy_(sent)
    return after


def squared_norms(
    gradients: GradientBuffer,
    *,
    tensor: Axis,
    data: Axis,
    tied: Mapping[str, Axis],
    num_layers: int = 1,
) -> Tensor:
    """What this rank adds to the squared norm of each layer, after the reductions.

    Each logical parameter counts once in the world: a copy on several tensor ranks on the first
    of them, a tied copy on its first holder, everything on the first data rank only, or, where
    data ranks own slices, each slice on its owner. By layers, so that their sum does not depend
    on which rank holds which: no schedule changes a bit of it.

    Returns:
        [num_layers + 1] fp64: the shares, by the position in the logical name, and 1 where this
        rank holds any inf or nan (in what counts elsewhere too: a copy that went wrong must not
        pass unseen), else 0.
    """
    first = next(iter(gradients.flats.values()), None)
    device = None if first is None else first.device
    total = torch.zeros(num_layers + 1, dtype=torch.float64, device=device)
    for dtype, start, stop, counted, layer in _runs(gradients, tensor, data, tied):
        square = square_sum(gradients.flats[dtype][start:stop])
        if counted:
            total[layer] += square
        total[-1] += ~torch.isfinite(square)
    total[-1].clamp_(max=1.0)
    return total


class _Run(NamedTuple):
    """A stretch of a flat that counts, or not, for one layer."""

    dtype: torch.dtype
    start: int
    stop: int
    counted: bool
    layer: int


def _runs(
    gradients: GradientBuffer, tensor: Axis, data: Axis, tied: Mapping[str, Axis]
) -> list[_Run]:
    runs: list[_Run] = []
    layout = gradients.layout
    for dtype in gradients.flats:
        for slot in (slot for slot in gradients.slots if slot.dtype == dtype):
            start, stop = layout.owned(slot)
            if start == stop:
                continue
            counted = data.rank == 0 or bool(layout.buckets)
            counted &= tensor.rank == 0 or shard_of(slot.parameter).dim is not None
            counted &= slot.name not in tied or tied[slot.name].rank == 0
            run = _Run(dtype, start, stop, counted, _layer_of(slot.name))
            last = runs[-1] if runs else None
            if last and (last.dtype, last.stop, *last[3:]) == (dtype, start, *run[3:]):
                run = run._replace(start=runs.pop().start)
            runs.append(run)
    return runs


def _layer_of(name: str) -> int:
    """The position in a logical name: layers.12.weight -> 12; 0 for any other name."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else 0


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of squares in fp64, which fp32 gradients cannot overflow: not finite only if an
    element is not."""
    if tensor.device.type != "cpu":
        # In blocks: vector_norm first makes an fp64 copy of all that it is given.
        blocks = torch.split(tensor.reshape(-1), _DEVICE_NORM_BLOCK)
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
        return torch.stack(norms).square().sum()
    # vector_norm with a dtype is ten times slower on a CPU (docs/optimizer.md).
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(tensor.reshape(-1), _NORM_BLOCK):
        block = block.double()
        total += torch.dot(block, block)
    return total
