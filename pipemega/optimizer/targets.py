"""What the optimizer works on, and the way to it from gradients, and from it to parameters.

    gradients --reduce--> of logical parameters --lend--> target.grad
                                                          optimizer.step()
    parameters that compute <-------publish-------------- target

Here a target is a whole parameter of this rank, or a master of one; `zero.py` has slices of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from pipemega.gradients import (
    DataReduction,
    GradientBuffer,
    reduce_data,
    reduce_partial,
    reduce_tied,
    squared_norms,
    whole_layout,
)
from pipemega.mesh import Axis, Mesh
from pipemega.parameters import describe, shard_of
from pipemega.precision import Precision
from pipemega.slots import Layout, Slot

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Host:
    """Where targets and the optimizer's state lie in place of the device that computes.

    Args:
        device: the CPU.
        pin: in memory that a GPU copies from and to directly.
    """

    device: torch.device
    pin: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        """`tensor` over there; itself if it is there already."""
        moved = tensor.to(self.device)
        return moved.pin_memory() if self.pin and moved is not tensor else moved


class Targets:
    """Each trainable parameter of this rank, whole, or its master.

    Args:
        named: (logical name, parameter) of the local model, each once; cast in place.
        mesh: whose axes are reduced over.
        precision: decides on masters, and on the dtype of gradients.
        tied: logical name -> the ranks that hold a copy of a tied parameter.
        copies: logical name -> the same parameter in later stages of this rank: other objects,
            whose gradients are added to its own, and that share its numbers from here on.
        reduction: over the data axis.
        host: where to keep what the optimizer works on; None: with the parameters.
    """

    def __init__(
        self,
        named: Named,
        mesh: Mesh,
        *,
        precision: Precision | None = None,
        tied: Mapping[str, Axis] | None = None,
        copies: Mapping[str, Sequence[nn.Parameter]] | None = None,
        reduction: DataReduction | None = None,
        host: Host | None = None,
    ) -> None:
        self.mesh = mesh
        self._precision = precision if precision is not None else Precision()
        self._tied = dict(tied or {})
        self._reduction = reduction if reduction is not None else DataReduction()
        self._host = host
        parameters = dict(named)
        trainable = [(name, p) for name, p in named if p.requires_grad]
        others = [
            (f"{name} (copy {number})", name, copy)
            for name, found in (copies or {}).items()
            for number, copy in enumerate(found, 1)
        ]
        self._copy_of = {own: name for own, name, _ in others}
        slots = [*trainable, *((own, p) for own, _, p in others if p.requires_grad)]
        dtype = self._precision.accumulation_dtype
        self.layout = self._lay_out(slots, dtype)
        masters = self._precision.cast_parameters(named, self._part)
        self._place()
        for _, name, copy in others:
            copy.data = parameters[name].data
        self.gradients = GradientBuffer(slots, dtype=dtype, layout=self.layout)
        self._slots = [slot for slot in self.gradients.slots if slot.name not in self._copy_of]
        self.masters = frozenset(masters)
        """Names of the targets that are masters: part of the state."""
        own = {slot.name: slot for slot in self._slots}
        self.named: dict[str, nn.Parameter] = {
            name: masters[name] if name in masters else self._target_of(own[name])
            for name, _ in trainable
        }
        """Logical name -> what the optimizer works on, in the order of the model."""
        self._hold_apart()

    @property
    def spans(self) -> dict[str, tuple[int, int]] | None:
        """Logical name -> [start, stop) of the flattened parameter that the target holds.

        None where targets are whole.
        """
        return None

    @property
    def data(self) -> Axis | None:
        """The ranks that hold the other slices of each target; None where targets are whole."""
        return None

    # From gradients

    def reduce(self) -> float:
        """Gradients of logical parameters, but for the factor that is returned."""
        self.gradients.attach()
        self._fold_copies()
        reduce_partial(self.gradients, self.mesh.tensor)
        self._sum_over_holders()
        return reduce_data(self.gradients, self.mesh.data, self._reduction)

    def squared_norms(self, num_layers: int) -> Tensor:
        """What this rank adds to the squared norms, after `reduce`: [num_layers + 1]."""
        return squared_norms(
            self.gradients,
            tensor=self.mesh.tensor,
            data=self.mesh.data,
            tied=self._tied,
            num_layers=num_layers,
        )

    @cached_property
    def gradient_tensors(self) -> list[Tensor]:
        """All that counts of the gradients after `reduce`."""
        return list(self.gradients.flats.values())

    def lend(self, factor: float) -> None:
        """Gives the targets their gradients times `factor`: the views, where dtypes agree."""
        if factor != 1.0:
            for gradient in self.gradient_tensors:
                gradient.mul_(factor)
        for slot in self._slots:
            view, target = self._gradient_of(slot), self.named[slot.name]
            if _alike(view, target):
                target.grad = view
                continue
            if target.grad is None:
                target.grad = torch.empty_like(target, pin_memory=target.is_pinned())
            target.grad.copy_(view)

    def take_back(self) -> None:
        """Lets go of gradients that were made for the targets, where they take up the device."""
        for slot in self._slots:
            target = self.named[slot.name]
            if target.dtype != slot.dtype and target.device == slot.parameter.device:
                target.grad = None

    # To parameters

    @torch.no_grad()
    def publish(self) -> None:
        """Gives the parameters that compute the numbers of their targets."""
        apart = [slot for slot in self._slots if slot.name in self._apart]
        if apart:
            torch._foreach_copy_(
                [self._computing(slot) for slot in apart], [self.named[s.name] for s in apart]
            )

    @torch.no_grad()
    def follow(self) -> None:
        """After new numbers in parameters and masters: each takes those of the other's."""
        for slot in self._slots:
            if slot.name in self._apart - self.masters:
                self.named[slot.name].copy_(self._computing(slot))
        self.publish()

    def wait(self) -> None:
        """Returns when all parameters are whole."""

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Local tensors of the parameters' shapes from those of the targets' shapes.

        Collective over the data axis.
        """
        return dict(values)

    def whole_masters(self) -> dict[str, Tensor]:
        """Logical name -> the master, of the parameter's shape; collective as `whole` is."""
        return self.whole({name: self.named[name].detach() for name in self.masters})

    # What slices do in other ways

    def _lay_out(self, named: Named, dtype: torch.dtype | None) -> Layout:
        return whole_layout(named, dtype)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """What a target holds of the parameter `name`."""
        return whole if self._host is None else self._host.take(whole)

    def _place(self) -> None:
        """Moves the parameters to where they are to lie."""

    def _computing(self, slot: Slot) -> Tensor:
        """What the target's numbers are for: the parameter, or what this rank owns of it."""
        return slot.parameter

    def _gradient_of(self, slot: Slot) -> Tensor:
        return self.gradients.view(slot.parameter)

    def _target_of(self, slot: Slot) -> nn.Parameter:
        """Of a parameter without a master."""
        return slot.parameter

    # Parts of the above

    def _hold_apart(self) -> None:
        """Moves targets without a master to the host; finds those that are no parameters."""
        moved: set[str] = set()
        for name, target in self.named.items():
            if self._host is None:
                break
            there = self._host.take(target.detach())
            if there.device != target.device:
                self.named[name] = describe(nn.Parameter(there), shard_of(target))
                moved.add(name)
        self._apart = self.masters | moved

    def _sum_over_holders(self) -> None:
        reduce_tied(self.gradients, self._tied)

    def _fold_copies(self) -> None:
        views = {slot.name: self.gradients.view(slot.parameter) for slot in self.gradients.slots}
        for copy, name in self._copy_of.items():
            if copy in views:
                views[name].add_(views[copy])
                views[copy].zero_()


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device)
