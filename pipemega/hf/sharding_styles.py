"""Shards a layer of transformers over the tensor ranks, by a style for each module.

    colwise                           rows of a linear are sharded; the output is a slice
    blocks:N, qkv                     the same, for N equal blocks, or q, k and v, that are stacked
    colwise_gather_output             rows are sharded; the output is gathered
    rowwise                           columns are sharded; the outputs are summed
    rowwise_split_input               the same, for an input that is equal on all ranks
    replicated_with_grad_allreduce    runs on the heads of this rank: the gradient is partial
    mla_kv_a_proj                     its last channels go to the heads of this rank, the rest to a
                                      column-parallel linear
    moe_tp_experts                    a part of each expert; the outputs are summed
    packed_colwise, packed_rowwise,   a parameter, sharded along one of its dims; packed: two blocks
    colwise, rowwise, dim:D
    on_first_rank                     a parameter that is added on the first rank only

The names are those of transformers' plans (`base_model_tp_plan`), except blocks, qkv, dim and
on_first_rank.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.hf.families import Family
from pipemega.hf.placeholders import set_module
from pipemega.hf.weight_source import mark_transposed
from pipemega.parameters import Shard, attach_shard, even_share, mark_partial_gradient
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    reduce_from_tensor,
    scatter_to_tensor,
)


class SplitInputLinear(RowParallelLinear):
    """Row-parallel linear of an input that is equal on all tensor ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scatter_to_tensor(x, self.axis))


def shard_layer(
    layer: nn.Module, styles: dict[str, str], family: Family, config: Any, axis: Axis
) -> nn.Module:
    """Replace the modules and parameters of `layer`, on meta, by this rank's shards; return it.

    Raises:
        ConfigError: a size is not a multiple of the tensor ranks, or a style is unknown.
    """
    modules = dict(layer.named_modules())
    for name, module in modules.items():
        if axis.size > 1 and name in styles:
            _shard_module(layer, name, module, styles[name], config, axis)
        elif axis.size == 1 and _transposed(module):
            # Its weight gradient can be deferred, unlike that of Conv1D.
            _shard_module(layer, name, module, "colwise", config, axis)
    if axis.size == 1:
        return layer
    for name, _ in list(layer.named_parameters()):
        if name in styles:
            _shard_parameter(layer, name, styles[name], axis)
    for name, attributes in family.divided.items():
        module = modules.get(name)  # an encoder's layer has no cross-attention
        for attribute in attributes if module is not None else ():
            whole = getattr(module, attribute)
            setattr(module, attribute, even_share(whole, axis.size, attribute))
    for name, keys in family.divided_config.items():
        own = copy.copy(modules[name].config)
        for key in keys:
            vars(own)[key] = even_share(getattr(own, key), axis.size, key)
        modules[name].config = own
    return layer


def _transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _features(module: Any) -> tuple[int, int, bool]:
    """Return (in, out, whether it has a bias) of a linear."""
    if _transposed(module):
        return module.nx, module.nf, True
    return module.in_features, module.out_features, module.bias is not None


def _shard_module(
    layer: nn.Module, name: str, module: nn.Module, style: str, config: Any, axis: Axis
) -> None:
    kind, _, detail = style.partition(":")
    if kind in _IN_PLACE:
        _IN_PLACE[kind](module, config, axis)
        return
    size_in, size_out, bias = _features(module)
    dtype = next(module.parameters()).dtype
    options: Any = {
        "axis": axis, "bias": bias, "init_method": None, "dtype": dtype, "device": "meta",
    }  # fmt: skip
    new: ColumnParallelLinear | RowParallelLinear
    if kind in ("colwise", "blocks", "qkv", "colwise_rep", "colwise_gather_output"):
        blocks: int | list[int] = size_out
        if kind == "blocks":
            blocks = [size_out // int(detail)] * int(detail)
        elif kind == "qkv":
            blocks = _qkv_sizes(config)
        gathered = kind in ("colwise_rep", "colwise_gather_output")
        new = ColumnParallelLinear(size_in, blocks, gather_output=gathered, **options)
    elif kind in ("rowwise", "rowwise_rep"):
        new = RowParallelLinear(size_in, size_out, **options)
    elif kind == "rowwise_split_input":
        new = SplitInputLinear(size_in, size_out, **options)
    else:
        raise ConfigError(
            f"{config.model_type}: the plan of transformers shards {name} by the style "
            f"{style!r}, which is not known: use mesh.tensor = 1",
            on_every_rank=True,
        )
    if _transposed(module):
        mark_transposed(new.weight)
    set_module(layer, name, new)


def _qkv_sizes(config: Any) -> list[int]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [heads * head, groups * head, groups * head]


def _mark_partial(module: nn.Module, config: Any, axis: Axis) -> None:
    mark_partial_gradient(module)


def _copy_rope_channels(module: nn.Module, config: Any, axis: Axis) -> None:
    """The last channels of the output go to the heads of this rank without another linear."""

    def copy_last(_module: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
        rope = config.qk_rope_head_dim
        latent, keys = torch.split(y, [y.shape[-1] - rope, rope], -1)
        return torch.cat([latent, copy_to_tensor(keys, axis)], -1)

    module.register_forward_hook(copy_last)


def _sum_experts(module: nn.Module, config: Any, axis: Axis) -> None:
    """Each rank has a part of each expert: copy what enters, sum what leaves."""
    run = module.forward

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        bias = module._parameters.get("down_proj_bias")
        if bias is not None and axis.rank > 0:
            module._parameters["down_proj_bias"] = bias * 0  # type: ignore[assignment]
        try:
            y = run(copy_to_tensor(hidden, axis), index, copy_to_tensor(weights, axis))
        finally:
            if bias is not None:
                module._parameters["down_proj_bias"] = bias
        return reduce_from_tensor(y, axis)

    vars(module)["forward"] = forward


_IN_PLACE: dict[str, Callable[[nn.Module, Any, Axis], None]] = {
    "replicated_with_grad_allreduce": _mark_partial,
    "mla_kv_a_proj": _copy_rope_channels,
    "moe_tp_experts": _sum_experts,
}


def _shard_parameter(layer: nn.Module, name: str, style: str, axis: Axis) -> None:
    path, _, last = name.rpartition(".")
    owner, parameter = layer.get_submodule(path), layer.get_parameter(name)
    kind, _, detail = style.partition(":")
    if kind == "on_first_rank":
        attach_shard(parameter, Shard(tuple(parameter.shape), partial_gradient=True))
        return
    dim = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}.get(kind)
    dim = (int(detail) if dim is None else dim) % parameter.dim()
    blocks = 2 if kind.startswith("packed") else 1
    size = parameter.shape[dim] // blocks
    share = even_share(size, axis.size, name)
    starts = [block * size + axis.rank * share for block in range(blocks)]
    shape = list(parameter.shape)
    shape[dim] = share * blocks
    local = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
    ranges = tuple((start, start + share) for start in starts)
    setattr(owner, last, attach_shard(local, Shard(tuple(parameter.shape), dim, ranges)))
