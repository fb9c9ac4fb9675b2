"""DeepSpeed's LayerSpec and TiedLayerSpec, and layers that a PipelineModule has built from them."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pipemega.compat.deepspeed.runtime_calls import set_random_seed
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipemegaError
from pipemega.parameters import Shard, attach_shard, shard_of
from pipemega.pipeline.model.spec import LayerSpec, TiedLayerSpec, as_specs
from pipemega.pipeline.tracing.module_source import copy_structure
from pipemega.random import preserve_all_rng

_ONE_RANK = Axis("tensor")


class PipeLayerSpec(LayerSpec):
    """`deepspeed.pipe.LayerSpec`: the class of a layer and its arguments.

    A constructor that needs real tensors, such as one that loads weights, works: it runs on the
    ranks that have the layer, and on the others only to learn the shapes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An argument of the layer here, as all others.
        device = {"device": kwargs.pop("device")} if "device" in kwargs else {}
        super().__init__(*args, **kwargs)
        self.kwargs |= device

    @property
    def module_args(self) -> tuple[Any, ...]:
        return self.args

    @property
    def module_kwargs(self) -> dict[str, Any]:
        return self.kwargs

    def build(
        self,
        tensor: Axis | None = None,
        device: torch.device | str | None = None,
        log: bool = False,
    ) -> nn.Module:
        """Build the layer; without arguments as `spec.build()` of DeepSpeed."""
        tensor = tensor if isinstance(tensor, Axis) else _ONE_RANK
        if device is None or torch.device(device).type != "meta":
            return super().build(tensor, device)
        mark_tensor_shards(self._structure, tensor)
        return self._structure

    @cached_property
    def _structure(self) -> nn.Module:
        """The layer on the meta device."""
        with preserve_all_rng():
            try:
                with warnings.catch_warnings():
                    # Loaded weights do not fit into tensors without values.
                    warnings.simplefilter("ignore")
                    built = super().build(_ONE_RANK, "meta")
            except PipemegaError:
                built = super().build(_ONE_RANK, "cpu")
        structure = copy_structure(built, "meta")
        for name, parameter in built.named_parameters():
            vars(structure.get_parameter(name)).update(vars(parameter))
        return structure


class PipeTiedLayerSpec(PipeLayerSpec, TiedLayerSpec):
    """`deepspeed.pipe.TiedLayerSpec`: a layer that shares weights with others of the same key.

    Args:
        tied_weight_attr: names of attributes of the layer, such as "weight", "linear.weight" or a
            property that returns a parameter.
    """

    @cached_property
    def _tied_names(self) -> dict[str, tuple[str, str]]:
        return {self._name_of(attr): (self.key, attr) for attr in self.tied_weight_attr}

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return self._tied_names

    def _name_of(self, attr: str) -> str:
        """Return the name of the parameter that attribute `attr` of the layer is."""
        value: Any = self._structure
        parameters = dict(self._structure.named_parameters(remove_duplicate=False))
        try:
            for part in attr.split("."):
                value = getattr(value, part)
        except AttributeError:
            value = None
        for name, parameter in parameters.items():
            if parameter is value:
                return name
        found = "does not exist" if value is None else f"is of type {type(value).__name__}"
        raise ConfigError(
            f"TiedLayerSpec({self.key!r}, {self.name}): tied_weight_attr {attr!r} {found}, and "
            f"must be a parameter of the layer, which has: {', '.join(parameters) or 'none'}",
            on_every_rank=True,
        )


class _WrappedSpec(LayerSpec):
    """The layer of `spec`, which a subclass builds in another way."""

    def __init__(self, spec: LayerSpec, typename: Callable[..., nn.Module]) -> None:
        super().__init__(typename)
        self._spec = spec
        self.forward_fn = spec.forward_fn

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return self._spec.ties

    @property
    def name(self) -> str:
        return self._spec.name


class SeededLayerSpec(_WrappedSpec):
    """A layer whose constructor runs with a seed of its own.

    Args:
        spec: of the layer.
        seed_fn: is called with `seed` before; None: seed torch, numpy and `random`.
    """

    def __init__(self, spec: LayerSpec, seed: int, seed_fn: Callable[[int], Any] | None) -> None:
        super().__init__(spec, spec.typename)
        self.args, self.kwargs, self._seed = spec.args, spec.kwargs, seed
        self._seed_fn = seed_fn if seed_fn is not None else set_random_seed

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type == "meta":
            return self._spec.build(tensor, device)
        with preserve_all_rng():
            self._seed_fn(self._seed)
            return self._spec.build(tensor, device)


class BuiltLayerSpec(_WrappedSpec):
    """A layer that the PipelineModule has built; it is used directly, not copied."""

    already_built = True

    def __init__(self, layer: nn.Module, spec: LayerSpec) -> None:
        super().__init__(spec, type(layer))
        self.layer = layer

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type != "meta":
            return self.layer.to(device)
        return self.layer

    def on_meta(self) -> LayerSpec:
        copied = copy_structure(self.layer, "meta")
        for name, parameter in copied.named_parameters():
            attach_shard(parameter, shard_of(self.layer.get_parameter(name)))
        return BuiltLayerSpec(copied, self._spec)


def layers_as_specs(layers: Iterable[Any]) -> tuple[LayerSpec, ...]:
    """Return the list of layers of DeepSpeed's PipelineModule as specs.

    Raises:
        ConfigError: an entry is no layer; the same on every rank.
    """
    entries = list(layers)
    for position, layer in enumerate(entries):
        if isinstance(layer, nn.Module) and hasattr(layer, "_layer_specs"):
            raise ConfigError(
                f"layers[{position}] is a PipelineModule: put its layers in the list instead",
                on_every_rank=True,
            )
    return as_specs(entries)


def mark_tensor_shards(layer: nn.Module, axis: Axis) -> None:
    """Attach shards to parameters that Megatron's parallel layers have marked as cut.

    They have the attributes `tensor_model_parallel` (older: `model_parallel`) and `partition_dim`.
    """
    for parameter in layer.parameters():
        cut = getattr(
            parameter, "tensor_model_parallel", getattr(parameter, "model_parallel", False)
        )
        if not cut or axis.size == 1:
            continue
        dim = max(int(getattr(parameter, "partition_dim", 0)), 0)
        size = parameter.shape[dim]
        shape = [*parameter.shape]
        shape[dim] = size * axis.size
        start = axis.rank * size
        attach_shard(parameter, Shard(tuple(shape), dim, ((start, start + size),)))
