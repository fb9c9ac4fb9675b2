"""LayerArguments: what HF's forward passes to each layer besides its hidden states.

Masks, rotary tables, positions: computed by a run of the model with placeholders for layers and
stubs for embeddings and head, once for each shape and each set of side inputs.
"""

import re
from collections import OrderedDict
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.hf.description import LayerReached, ModelDescription
from pipemega.hf.layer_messages import Side, split_hidden
from pipemega.hf.parameter_memory import allocate
from pipemega.hf.placeholders import ModuleStub, on_meta
from pipemega.hf.planned_runs import on_cpu, run_on_meta, zeros_on_cpu

# Micro-batches of a pipeline are in flight at the same time, and backward may recompute one.
_KEPT = 16

# (leaves, tree, [(leaf, index of the carried tensor)]) of one layer.
_Recorded = tuple[list[Any], Any, list[tuple[int, int]]]


class LayerArguments:
    """Records and caches the arguments of the layers of one model."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._recorded: OrderedDict[Any, tuple[list[_Recorded], Side]] = OrderedDict()
        self._shells: dict[Any, nn.Module] = {}

    def of(
        self, index: int, hidden: Tensor, carried: list[Tensor], side: Side
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of layer `index` after its hidden states.

        Args:
            hidden: [batch, sequence, ...]; only its shape, dtype and device count.
            carried, side: see layer_messages.py.
        """
        leaves, tree, slots = self._recorded_for(hidden, side)[index]
        if slots:
            leaves = list(leaves)
            for place, number in slots:
                leaves[place] = carried[number]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return args, kwargs

    @cached_property
    def follow_positions(self) -> bool:
        """Return whether the layers follow position_ids that restart, as in packed documents.

        Every layer must get a mask that follows them, and mix positions by this mask only. Flash
        attention gets the positions instead of a mask.
        """
        d = self._description
        if "position_ids" not in d.accepted or any(_mixes_positions(x) for x in d.layers):
            return False
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device="cpu")
        hidden = torch.zeros(1, 8, 1, device="cpu")
        for index in range(len(d.layers)):
            arguments = self.of(index, hidden, [], {"position_ids": positions})
            given = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
            if "flash" in str(d.config._attn_implementation):
                if not any(t is positions for t in given):
                    return False
            elif not any(_hides_first_document(t) for t in given):
                return False
        return True

    def carried_slots(self, index: int, hidden: Tensor, side: Side) -> list[int]:
        """Return the leaves of the other arguments of layer `index` that are carried, in order."""
        _, _, slots = self._recorded_for(hidden, side)[index]
        first = {number: place for place, number in reversed(slots)}
        return [first[number] for number in sorted(first)]

    def _recorded_for(self, hidden: Tensor, side: Side) -> list[_Recorded]:
        # The version changes if a loader fills the same tensor again.
        inputs = ((name, id(value), value._version) for name, value in side.items())
        key = (hidden.shape[:2], hidden.dtype, hidden.device, *inputs)
        if key not in self._recorded:
            # The side inputs are kept, so that no other tensors get their ids.
            self._recorded[key] = (self._record(hidden, side), side)
            while len(self._recorded) > _KEPT:
                self._recorded.popitem(last=False)
        return self._recorded[key][0]

    def run_on_meta(self, part: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> Any:
        """Return the output of a part of the model on the meta device.

        Args:
            part: the model with placeholders.
            dtype: of the hidden states.
        """
        d = self._description

        def run_on_cpu() -> None:
            shell = self._shell_on(dtype, torch.device("cpu"))
            _on_each_layer(
                d, shell, lambda index, args, kwargs: _same_hidden(d, index, args, kwargs)
            )
            with torch.enable_grad():
                d.run(shell, zeros_on_cpu(inputs))

        return run_on_meta(lambda: d.run(part, inputs), run_on_cpu)

    def _record(self, hidden: Tensor, side: Side) -> list[_Recorded]:
        if hidden.is_meta:
            with on_cpu():
                found = self._record(*zeros_on_cpu((hidden.detach(), side)))
                return [(on_meta(leaves), tree, slots) for leaves, tree, slots in found]
        d = self._description
        recorded: list[_Recorded] = []
        numbers: dict[int, int] = {}  # id of a carried tensor -> its number
        kept_alive = []

        def on_layer(index: int, args: Any, kwargs: Any) -> Any:
            if index in d.first_of_stack:
                # Each stack has carried tensors of its own.
                numbers.clear()
            x, *others = split_hidden(args, kwargs)
            leaves, tree = pytree.tree_flatten(tuple(others))
            slots = []
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    slots.append((place, numbers.setdefault(id(leaf), len(numbers))))
                    kept_alive.append(leaf)
                    leaves[place] = None
            recorded.append((leaves, tree, slots))
            if len(recorded) == len(d.layers):
                raise LayerReached
            return d.as_layer_output(index, x.detach().requires_grad_())

        shell = self._shell_on(hidden.dtype, hidden.device)
        _on_each_layer(d, shell, on_layer)
        # The innermost hooks apply: those of activation checkpointing would count what this saves.
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.enable_grad(), no_hooks, suppress(LayerReached):
            d.run(shell, d.stand_in_inputs(hidden, side))
        return recorded

    def _shell_on(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        key = (dtype, device)
        if key not in self._shells:
            shell = self._description.shell(set(), None)
            for module in shell.modules():
                if isinstance(module, ModuleStub):
                    vars(module)["dtype"] = dtype
            self._shells[key] = allocate(shell, device).eval()
        return self._shells[key]


def _on_each_layer(d: ModelDescription, shell: nn.Module, on_layer: Any) -> None:
    for stack in d.stacks:
        for placeholder in shell.get_submodule(stack).children():
            placeholder.on_call = on_layer


def _same_hidden(d: ModelDescription, index: int, args: Any, kwargs: Any) -> Any:
    """Stand in for a layer: return its input."""
    x, *_ = split_hidden(args, kwargs)
    return d.as_layer_output(index, x.detach().requires_grad_())


# Recurrences, and the choice of tokens in sparse attention.
_MIXERS = re.compile(
    r"Indexer|Compressor|Mamba|Mixer$|Recurrent|DeltaNet|LightningAttention|DogeAttention"
)


def _mixes_positions(layer: nn.Module) -> bool:
    """Return whether a layer mixes positions otherwise than by attention with a mask."""
    return any(
        isinstance(module, nn.Conv1d) or _MIXERS.search(type(module).__name__)
        for module in layer.modules()
    )


def _hides_first_document(mask: Tensor) -> bool:
    """Return whether token 4 does not see token 3 in a mask [..., 8, 8]."""
    if mask.dim() != 4 or mask.shape[-2:] != (8, 8):
        return False
    seen = mask[0, 0, 4, 3]
    return not bool(seen) if mask.dtype == torch.bool else bool(seen < -1e3)
