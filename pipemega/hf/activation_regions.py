"""Where the activations of a layer are replicated, sharded or slices of the sequence.

    region        activations on a tensor rank             dropout
    replicated    equal on all ranks                       equal masks
    sharded       of its heads or channels                 different masks
    sequence      of its slice of the sequence             slices of one mask

From a column-parallel to the next row-parallel linear a layer is in the region `sharded`. With
sequence parallelism the rest of a layer is in the region `sequence`, and the modules with sharded
linears gather the sequence:

    all linears of the module are sharded    all-gather, column-parallel .. row-parallel,
                                             reduce-scatter (backward: the conjugates)
    other parameters too (routers, latents)  all-gather, module as without sequence parallelism,
                                             slice
    a linear directly in the layer           gathers and scatters itself

Source of the collectives: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipemega.distributed.mesh import Axis
from pipemega.parameters import mark_partial_gradient
from pipemega.random import sharded_rng
from pipemega.tensor_parallel import ColumnParallelLinear
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    copy_to_tensor,
    gather_from_tensor,
    gather_sequence,
    scatter_sequence,
)
from pipemega.tensor_parallel.layers import sequence_dropout

_COLUMN, _ROW = ("colwise", "blocks", "qkv"), ("rowwise", "rowwise_rep")
# A module with only these gets a shard or a slice, and gathers nothing.
_NO_GATHER = (*_ROW, "rowwise_split_input", "replicated_with_grad_allreduce")
_SIMPLE = (*_COLUMN, *_ROW, "replicated_with_grad_allreduce")


class Region(Enum):
    """See the table above."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    SEQUENCE = "sequence"


class Place(Enum):
    """What a sharded linear gets: x is replicated, gathered by its module, or a slice."""

    REPLICATED = "replicated"
    GATHERED = "gathered"
    SEQUENCE = "sequence"


class GatheredColumnLinear(ColumnParallelLinear):
    """Column-parallel linear whose module has gathered the sequence.

    The gradient of x comes from this rank's rows only; `gather_sequence` sums it over the ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class ActivationRegions:
    """Tracks the region while a layer runs, and moves activations between regions.

    Args:
        sequence_parallel: activations between the modules of a layer are slices of the sequence.
        has_dropout: a dropout of the model is greater than 0.
    """

    def __init__(self, axis: Axis, sequence_parallel: bool, has_dropout: bool) -> None:
        self.axis, self.sequence_parallel, self.has_dropout = axis, sequence_parallel, has_dropout
        self._outer = Region.SEQUENCE if sequence_parallel else Region.REPLICATED
        self.current = self._outer
        # Modules that gather the sequence -> whether all their linears are sharded.
        self._boundaries: dict[str, bool] = {}

    def find_boundaries(self, layer: nn.Module, styles: Mapping[str, str]) -> None:
        """Find the modules that gather the sequence."""
        if not self.sequence_parallel:
            return
        modules = dict(layer.named_modules())
        parents = {
            name.rpartition(".")[0]
            for name, style in styles.items()
            if name in modules and style.partition(":")[0] not in _NO_GATHER
        } - {""}
        outermost = [p for p in parents if not any(p.startswith(f"{o}.") for o in parents)]
        for name in outermost:
            inner = [f"{name}.{p}" for p, _ in modules[name].named_parameters()]
            simple = all(
                parameter in styles
                or styles.get(parameter.rpartition(".")[0], "").partition(":")[0] in _SIMPLE
                for parameter in inner
            )
            self._boundaries[name] = simple

    def place_of(self, name: str) -> Place:
        """Return what the sharded linear `name` gets."""
        if not self.sequence_parallel:
            return Place.REPLICATED
        for boundary, simple in self._boundaries.items():
            if name.startswith(f"{boundary}."):
                return Place.GATHERED if simple else Place.REPLICATED
        return Place.SEQUENCE

    def attach(self, layer: nn.Module, styles: Mapping[str, str]) -> None:
        """Add hooks to a sharded layer."""
        modules = dict(layer.named_modules())
        for name, style in styles.items() if self.has_dropout else ():
            kind = style.partition(":")[0]
            if name in modules and kind in _COLUMN:
                modules[name].register_forward_hook(self._enter(Region.SHARDED))
            elif name in modules and kind in _ROW:
                gathered = self.place_of(name) is not Place.REPLICATED
                region = Region.SEQUENCE if gathered else Region.REPLICATED
                modules[name].register_forward_hook(self._enter(region))
        if not self.sequence_parallel:
            return
        for name, simple in self._boundaries.items():
            module = modules[name]
            if not simple:
                module.register_forward_pre_hook(self._gather_whole, with_kwargs=True)
                module.register_forward_hook(self._scatter_whole)
            else:
                module.register_forward_pre_hook(self._gather, with_kwargs=True)
        for name in modules:
            around = any(f"{b}.".startswith(f"{name}." if name else "") for b in self._boundaries)
            inside = any(f"{name}.".startswith(f"{b}.") for b in self._boundaries)
            if not around and not inside:
                mark_partial_gradient(modules[name])

    def _enter(self, region: Region) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.current = region

        return hook

    def _gather(self, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _on_hidden(args, kwargs, lambda x: gather_sequence(x, self.axis))
        # The output of an encoder is replicated.
        if isinstance(kwargs.get("key_value_states"), Tensor):
            copied = copy_to_tensor(kwargs["key_value_states"], self.axis)
            kwargs = {**kwargs, "key_value_states": copied}
        return args, kwargs

    def _gather_whole(self, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.current = Region.REPLICATED
        return _on_hidden(
            args, kwargs, lambda x: gather_from_tensor(x, self.axis, dim=SEQUENCE_DIM)
        )

    def _scatter_whole(self, _module: Any, _inputs: Any, output: Any) -> Any:
        self.current = self._outer
        if isinstance(output, Tensor):
            return scatter_sequence(output, self.axis)
        return (scatter_sequence(output[0], self.axis), *output[1:])

    def during_forward(self, training: bool) -> AbstractContextManager[Any]:
        """Return the context in which a layer runs, with the right masks of dropout."""
        self.current = self._outer
        return _DropoutMode(self) if training and self.has_dropout else nullcontext()


def _on_hidden(args: Any, kwargs: Any, function: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Apply `function` to the hidden states: the first argument, or `hidden_states`."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}


class _DropoutMode(TorchFunctionMode):
    """Draws the masks of dropout for the region in which it runs."""

    def __init__(self, regions: ActivationRegions) -> None:
        super().__init__()
        self._regions = regions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        region, axis = self._regions.current, self._regions.axis
        if func is F.dropout or func is F.scaled_dot_product_attention:
            if region is Region.SHARDED:
                with sharded_rng(axis, args[0].device):
                    return func(*args, **kwargs)
            if region is Region.SEQUENCE and func is F.dropout:
                return sequence_dropout(axis, *args, **kwargs)
        return func(*args, **kwargs)


def has_dropout(config: Any) -> bool:
    """Return whether a key of the config sets a dropout greater than 0 in the layers."""
    return any(
        isinstance(value, float) and value > 0
        for key, value in vars(config).items()
        if "drop" in key and key not in _DROPOUT_OF_HEADS
    )


_DROPOUT_OF_HEADS = ("summary_first_dropout", "classifier_dropout", "cls_dropout")
