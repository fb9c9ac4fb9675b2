"""A layer of a Hugging Face model on one rank: sharded, and called with a message alone."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.hf.activation_regions import ActivationRegions, has_dropout
from pipemega.hf.description import ModelDescription
from pipemega.hf.expert_products import enable_deferral
from pipemega.hf.families import family_of, is_compared, styles_of
from pipemega.hf.first_values import set_first_values
from pipemega.hf.fp32_parameters import cast_parameter, keep_in_fp32
from pipemega.hf.layer_arguments import LayerArguments
from pipemega.hf.layer_messages import pack, unpack
from pipemega.hf.parameter_memory import allocate
from pipemega.hf.placeholders import set_module
from pipemega.hf.refusals import check_tensor_ranks
from pipemega.hf.sharding_styles import Sharding, shard_layer
from pipemega.hf.weight_source import WeightSource
from pipemega.monitor import get_logger


class _LocalLayer:
    """Put before the class of a layer: takes a message instead of HF's arguments."""

    def forward(self: Any, message: Any) -> Any:
        hidden, carried, side = unpack(message)
        args, kwargs = self._arguments.of(self._index, self._like_embeddings(hidden), carried, side)
        for name in self._sliced_arguments:
            if isinstance(kwargs.get(name), Tensor):
                sliced = _heads_of_rank(kwargs[name], hidden.shape[0], self._axis)
                kwargs = {**kwargs, name: sliced}
        with self._regions.during_forward(self.training):
            output = self.hf_forward(hidden, *args, **kwargs)
        return pack(output[0] if isinstance(output, tuple) else output, carried, side)

    # The arguments of HF's layer depend on its index; the layer itself is equal for all.
    compiled_method: str | None = "hf_forward"

    def hf_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _like_embeddings(self: Any, hidden: Tensor) -> Tensor:
        """Return a tensor of the shape and the dtype of the output of the embeddings.

        Masks and rotary tables depend on them. Sequence parallelism shards the sequence, and
        layers with parameters in fp32 return fp32.
        """
        dtype = hidden.dtype
        if self._of_dtype is not None:
            module, name = self._of_dtype
            dtype = module._parameters[name].dtype
        ranks = self._axis.size if self._regions.sequence_parallel else 1
        if ranks == 1 and dtype == hidden.dtype:
            return hidden
        batch, length, *rest = hidden.shape
        return hidden.new_empty((), dtype=dtype).expand(batch, length * ranks, *rest)


def build_layer(
    description: ModelDescription,
    arguments: LayerArguments,
    index: int,
    source: WeightSource | None,
    axis: Axis,
) -> nn.Module:
    """Build this rank's shard of layer `index` on torch's default device.

    The layer is that of transformers, with its names of parameters, as a subclass that maps a
    message (layer_messages.py) to a message.

    Raises:
        ConfigError: the layer cannot be sharded over the tensor ranks.
    """
    d, family = description, family_of(description.config_of_layer(index))
    stack, path = d.places[index]
    first = d.first_of_stack[stack]
    # All layers get their own copy of what only the first one has; the copies are tied.
    layer = copy.deepcopy(d.layers[first if family.shared else index])
    styles = styles_of(d.config)
    if axis.size > 1:
        check_tensor_ranks(d.config, axis.size, d.sequence_parallel)
        if index == 0 and axis.rank == 0 and not is_compared(d.config):
            get_logger().warning(
                f"{d.class_name} is sharded by the plan of transformers, and no gradients were "
                f"compared with the unsplit model: run `pipemega hf check` before training"
            )
    regions = ActivationRegions(
        axis, d.sequence_parallel and axis.size > 1, bool(styles) and has_dropout(d.config)
    )
    layer = shard_layer(layer, Sharding(styles, family, d.config, axis, regions))
    enable_deferral(layer)
    keep_in_fp32(layer, d.model, path)
    vars(layer).update(
        _arguments=arguments,
        _index=index,
        _axis=axis,
        _regions=regions,
        _of_dtype=cast_parameter(layer),
        _sliced_arguments=family.sliced_arguments if axis.size > 1 else (),
    )
    if regions.has_dropout:
        vars(layer)["compiled_method"] = None
        vars(layer)["uncompiled_reason"] = (
            "the model has dropout, whose masks depend on the module that runs: set the dropout "
            "rates of its config to 0"
        )
    layer.__class__ = _local_class(type(layer))  # type: ignore[arg-type]
    device = torch.get_default_device()
    allocate(layer, device)
    if device.type != "meta":
        names = {name: f"{path}.{name}" for name in layer.state_dict()}
        names |= {name: f"{d.places[first][1]}.{name}" for name in family.shared}
        set_first_values(layer, source, lambda: _model_with_layer(d, index), names)
    return layer


@cache
def _local_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the local layers of HF's class `kind`; one, so they compile once."""
    return type(kind.__name__, (_LocalLayer, kind), {})


def _model_with_layer(description: ModelDescription, index: int) -> nn.Module:
    """Return the model with one layer, and without other parameters."""
    model = description.shell(set(), None)
    set_module(model, description.places[index][1], copy.deepcopy(description.layers[index]))
    return model


def _heads_of_rank(tensor: Tensor, batch: int, axis: Axis) -> Tensor:
    """Return the entries of this rank's heads of [batch * heads, ...] or [batch, heads, ...].

    What is equal for all heads, [batch, 1, ...], is returned unchanged.
    """
    if tensor.dim() == 4:
        heads = tensor.shape[1]
        return tensor if heads == 1 else tensor.chunk(axis.size, dim=1)[axis.rank]
    heads = tensor.shape[0] // batch // axis.size
    by_rank = tensor.view(batch, axis.size, heads, *tensor.shape[1:])
    return by_rank[:, axis.rank].reshape(batch * heads, *tensor.shape[1:])
