"""A model whose layers get first values from tensors of the whole model."""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.errors import ConfigError
from pipemega.parameters import attach_shard, shard_of
from pipemega.pipeline.module import PipelineModule


def with_values(
    net: PipelineModule, values: Mapping[str, Tensor], new: Collection[str] = ()
) -> PipelineModule:
    """Return the model with these parameters and buffers; each rank copies its shards.

    Args:
        values: logical name (`layers.<position>.<name in the layer>`) -> unsharded tensor.
        new: names that keep their own first values.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; the same on every rank.
    """
    _check(net, values, new)
    specs = []
    for position, spec in enumerate(net.specs):
        prefix = f"layers.{position}."
        own = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
        filled = copy.copy(spec)
        filled.typename = _Filled(spec.typename, own)
        specs.append(filled)
    return net.with_specs(specs)


def _check(net: PipelineModule, values: Mapping[str, Tensor], new: Collection[str]) -> None:
    shapes = {
        f"layers.{position}.{name}": tuple(tensor.shape)
        for position, layer in enumerate(net.meta_layers)
        for name, tensor in layer.state_dict().items()
    }
    missing = sorted(shapes.keys() - values.keys() - set(new))
    unknown = sorted(values.keys() - shapes.keys())
    for names, where in ((missing, "only in the model"), (unknown, "only in the values")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
            raise ConfigError(
                f"the values do not fit the model: {len(names)} tensors are {where}: {shown}",
                on_every_rank=True,
            )
    for name, value in values.items():
        if tuple(value.shape) != shapes[name]:
            raise ConfigError(
                f"the values do not fit the model: {name} has the shape {list(value.shape)}, and "
                f"{list(shapes[name])} in the model",
                on_every_rank=True,
            )


class _Filled:
    """Builds a layer and fills its parameters and buffers."""

    def __init__(self, typename: Callable[..., nn.Module], values: Mapping[str, Tensor]) -> None:
        self._typename, self._values = typename, values
        self.__name__ = getattr(typename, "__name__", type(typename).__name__)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        layer = self._typename(*args, **kwargs)
        for name, parameter in layer.named_parameters():
            if name in self._values:
                shard = shard_of(parameter)
                if not parameter.is_meta:
                    shard.copy_from_full(self._values[name], parameter.data)
                # Not initialized afterwards.
                attach_shard(parameter, replace(shard, init_method=None))
        for name, buffer in layer.named_buffers():
            if name in self._values and not buffer.is_meta:
                buffer.copy_(self._values[name])
        return layer
