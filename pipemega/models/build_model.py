"""The model of a config: any registered type, for one mesh.

A model whose layers get first values from tensors of the whole model.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.config import Config
from pipemega.config.model_registry import ModelSection
from pipemega.distributed.mesh import Mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, PipemegaError
from pipemega.parameters import attach_shard, shard_of
from pipemega.pipeline.model.module import PipelineModule


@dataclass(frozen=True)
class ModelContext:
    """What a model type may need to build its model.

    Attributes:
        config: the config of the run.
        pipeline, tensor, data: sizes of the mesh axes.
        vocab_size: `vocab_size` of the section if it is a number, else the vocabulary size of the
            data; None if neither is known.
        dtype: the dtype of the parameters in forward and backward.
        device: the device of the run; the meta device if the model is only planned.
        micro_batch_size: samples of a micro-batch.
    """

    config: Config
    pipeline: int
    tensor: int
    data: int
    vocab_size: int | None
    dtype: torch.dtype
    device: torch.device
    micro_batch_size: int

    @classmethod
    def of(
        cls,
        config: Config,
        topology: Topology,
        device: torch.device | str = "meta",
        vocab_size: int | None = None,
    ) -> "ModelContext":
        """Return the context of a config on a mesh; `vocab_size` is known from the data."""
        own = model_section(config).vocabulary()
        dtype = config.compute_dtype
        return cls(
            config=config,
            pipeline=topology.pipeline,
            tensor=topology.tensor,
            data=topology.data,
            vocab_size=own if isinstance(own, int) else vocab_size,
            dtype=getattr(torch, dtype) if dtype else torch.get_default_dtype(),
            device=torch.device(device),
            micro_batch_size=config.batch(topology.data).micro_batch_size,
        )


def model_section(config: Config) -> ModelSection:
    """Return the section `model`.

    Raises:
        ConfigError: there is none.
    """
    if config.model is None:
        raise ConfigError("the config has no section 'model', which defines the model to build")
    return config.model


def build_model(config: Config, mesh: Mesh, vocab_size: int | None = None) -> PipelineModule:
    """Return the model of the section `model`; no layer is built yet.

    Args:
        vocab_size: vocabulary size of the data; None: not known.

    Raises:
        ConfigError: there is no section `model`, or its type cannot build the model.
    """
    return build_from(ModelContext.of(config, mesh.topology, mesh.device, vocab_size))


def build_from(context: ModelContext) -> PipelineModule:
    """Return the model of the context's config.

    Raises:
        ConfigError: the model type cannot build the model.
    """
    section = model_section(context.config)
    # A user's list of layers may contain built modules.
    on_meta = context.device.type == "meta" and not section.builder
    with torch.device("meta") if on_meta else nullcontext():
        net = _call(section, "build", context)
    if not isinstance(net, PipelineModule):
        raise ConfigError(
            f"model.type {section.type!r}: build() returned {type(net).__name__}, and must return "
            f"a pipemega.PipelineModule",
            on_every_rank=True,
        )
    return net


def sample_from(context: ModelContext) -> tuple[Any, Any]:
    """Return (inputs, labels) of one micro-batch on the meta device.

    Raises:
        ConfigError: the type has neither `sample` nor a number of tokens.
    """
    section = model_section(context.config)
    with torch.device("meta"):
        made = _call(section, "sample", context)
        if made is not None:
            return _checked_pair(section, made)
        length = section.sample_tokens()
        if length is None:
            raise ConfigError(
                f"model.type {section.type!r} has no method sample(context), which returns "
                f"(inputs, labels) of one micro-batch, and no key seq_length: the shapes of a "
                f"micro-batch are unknown"
            )
        tokens = torch.empty(context.micro_batch_size, length, dtype=torch.int64)
        return tokens, torch.empty_like(tokens)


def _checked_pair(section: ModelSection, made: Any) -> tuple[Any, Any]:
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ConfigError(
            f"model.type {section.type!r}: sample() returned {type(made).__name__}, and must "
            f"return (inputs, labels)"
        )
    return made


def _call(section: ModelSection, method: str, context: ModelContext) -> Any:
    """Call a method of the section; name the type in the error of a user's method."""
    try:
        return getattr(section, method)(context)
    except PipemegaError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.type {section.type!r}: {method}() failed: {type(error).__name__}: {error}"
        ) from error


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
