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
    local_params                      nothing: parameters of the module have styles of their own

The names are taken from transformers' plans (`base_model_tp_plan`), except blocks, qkv and dim.

Keys and values with fewer heads than tensor ranks: each rank computes the head it needs.

4 ranks, 8 heads of queries, 2 heads of keys      rank 0   q0 q1   k0
                                                  rank 1   q2 q3   k0
                                                  rank 2   q4 q5   k1
                                                  rank 3   q6 q7   k1

Experts are divided over the expert axis too, see routed_experts.py.

Embedding and head of a Hugging Face model, with the vocabulary sharded over tensor ranks.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.hf.activation_regions import ActivationRegions, GatheredColumnLinear, Place
from pipemega.hf.families import KEY_VALUE, Family
from pipemega.hf.placeholders import ModuleStub, set_module
from pipemega.hf.routed_experts import are_exchangeable, divide_experts
from pipemega.hf.weights.safetensors_files import mark_transposed
from pipemega.parameters import Shard, attach_shard, even_share, mark_partial_gradient
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pipemega.tensor_parallel.collectives import (
    copy_to_tensor,
    local_range,
    reduce_from_tensor,
    require_in_vocabulary,
    rows_per_rank,
    scatter_to_tensor,
)
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, GradientSink, OutputShard
from pipemega.tensor_parallel.layers import Product


class OneHeadLinear(nn.Module):
    """The rows of one head of a linear; the weight is replicated, its gradient partial.

    Args:
        linear: the linear of all heads, on meta.
        groups: number of its heads; the number of tensor ranks is a multiple of it.
        copies_input: x is replicated; False: the caller has copied or gathered it.

    Attributes:
        output_rows: the rows of the weight whose outputs this rank computes.

    Shape:
        x [..., in], equal on all tensor ranks  ->  [..., head]
    """

    def __init__(self, linear: nn.Linear, groups: int, axis: Axis, copies_input: bool) -> None:
        super().__init__()
        self.axis, self.copies_input = axis, copies_input
        head = linear.out_features // groups
        start = axis.rank * groups // axis.size * head
        self.output_rows = slice(start, start + head)
        self.weight, self.bias = linear.weight, linear.bias
        for parameter in self.parameters():
            attach_shard(parameter, Shard(tuple(parameter.shape), partial_gradient=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.copies_input:
            x = copy_to_tensor(x, self.axis)
        bias = None if self.bias is None else self.bias[self.output_rows]
        return F.linear(x, self.weight[self.output_rows], bias)


class SplitInputLinear(RowParallelLinear):
    """Row-parallel linear of an input that is equal on all tensor ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scatter_to_tensor(x, self.axis))


@dataclass(frozen=True)
class Sharding:
    """How to shard a layer.

    Args:
        styles: module or parameter of the layer -> style.
        family: attributes to divide.
        config: the `PretrainedConfig` of the model.
        axis, expert: the tensor axis and the expert axis of the mesh.
        regions: where activations are sharded, gathered or slices of the sequence.
    """

    styles: dict[str, str]
    family: Family
    config: Any
    axis: Axis
    expert: Axis
    regions: ActivationRegions


def shard_layer(layer: nn.Module, sharding: Sharding) -> nn.Module:
    """Replace the modules and parameters of `layer`, on meta, by this rank's shards; return it.

    Raises:
        ConfigError: a size is not a multiple of the tensor or expert ranks, or a style is unknown.
    """
    axis, styles = sharding.axis, sharding.styles
    modules = dict(layer.named_modules())
    sharding.regions.find_boundaries(layer, styles)
    for name, module in modules.items():
        if axis.size > 1 and name in styles:
            _shard_module(layer, name, module, sharding)
        elif _defers_no_gradient(module):
            # A ColumnParallelLinear can defer its weight gradient; Conv1D and FalconLinear cannot.
            size_in, size_out, bias = _features(module)
            new = ColumnParallelLinear(
                size_in, size_out, axis=Axis("tensor"), bias=bias, **_options(module)
            )
            for parameter in new.parameters():
                attach_shard(parameter, Shard(tuple(parameter.shape)))
            _replace(layer, name, module, new)
    if axis.size > 1:
        for name, _ in list(layer.named_parameters()):
            if name in styles:
                _shard_parameter(layer, name, styles[name], axis)
        _divide_attributes(modules, sharding)
    divide_experts(layer, sharding.config, sharding.expert)
    sharding.regions.attach(layer, styles)
    return layer


def _divide_attributes(modules: dict[str, nn.Module], sharding: Sharding) -> None:
    ranks = sharding.axis.size
    for name, attributes in sharding.family.divided.items():
        module = modules.get(name)  # an encoder's layer has no cross-attention
        for attribute in attributes if module is not None else ():
            whole = getattr(module, attribute)
            setattr(module, attribute, even_share(whole, ranks, attribute))
    for name, keys in sharding.family.divided_config.items():
        own: Any = copy.copy(modules[name].config)
        for key in keys:
            vars(own)[key] = even_share(getattr(own, key), ranks, key)
        modules[name].config = own


def _is_transposed_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _defers_no_gradient(module: nn.Module) -> bool:
    """Return whether this is a linear whose forward split backward does not replace."""
    return _is_transposed_linear(module) or type(module).__name__ == "FalconLinear"


def _features(module: Any) -> tuple[int, int, bool]:
    """Return (in, out, whether it has a bias) of a linear."""
    if _is_transposed_linear(module):
        return module.nx, module.nf, True
    return module.in_features, module.out_features, module.bias is not None


def _options(module: nn.Module) -> Any:
    return {"init_method": None, "dtype": next(module.parameters()).dtype, "device": "meta"}


def _replace(layer: nn.Module, name: str, module: nn.Module, new: nn.Module) -> None:
    if _is_transposed_linear(module):
        mark_transposed(new.get_parameter("weight"))
    set_module(layer, name, new)


def _shard_module(layer: nn.Module, name: str, module: nn.Module, sharding: Sharding) -> None:
    config, axis = sharding.config, sharding.axis
    kind, _, detail = sharding.styles[name].partition(":")
    if kind in _IN_PLACE:
        _IN_PLACE[kind](module, config, axis)
        return
    if kind not in (*COLUMN_STYLES, *_GATHERED_STYLES, *ROW_STYLES):
        raise ConfigError(
            f"{config.model_type}: the plan of transformers shards {name} by the style "
            f"{sharding.styles[name]!r}, which is not known: use mesh.tensor = 1",
            on_every_rank=True,
        )
    place = sharding.regions.place_of(name)
    size_in, size_out, bias = _features(module)
    options = {"axis": axis, "bias": bias, **_options(module)}
    new: nn.Module
    if kind in COLUMN_STYLES or kind in _GATHERED_STYLES:
        groups = getattr(config, "num_key_value_heads", None) or axis.size
        if kind == "colwise" and name.split(".")[-1] in KEY_VALUE and groups < axis.size:
            new = OneHeadLinear(module, groups, axis, place is not Place.GATHERED)  # type: ignore[arg-type]
            owner: Any = layer.get_submodule(name.rpartition(".")[0])
            owner.num_key_value_groups = config.num_attention_heads // axis.size
        else:
            blocks = _blocks(kind, detail, size_out, config)
            for size in blocks:
                even_share(size, axis.size, f"the output of {name}")
            if place is Place.GATHERED:
                new = GatheredColumnLinear(size_in, blocks, **options)
            else:
                new = ColumnParallelLinear(
                    size_in,
                    blocks if len(blocks) > 1 else size_out,
                    gather_output=kind in _GATHERED_STYLES,
                    sequence_parallel=place is Place.SEQUENCE,
                    **options,
                )
    else:
        even_share(size_in, axis.size, f"the input of {name}")
        linear = SplitInputLinear if kind == "rowwise_split_input" else RowParallelLinear
        sequence_parallel = place in (Place.GATHERED, Place.SEQUENCE)
        new = linear(size_in, size_out, sequence_parallel=sequence_parallel, **options)
    _replace(layer, name, module, new)


COLUMN_STYLES = ("colwise", "blocks", "qkv")
_GATHERED_STYLES = ("colwise_rep", "colwise_gather_output")
ROW_STYLES = ("rowwise", "rowwise_rep", "rowwise_split_input")


def _blocks(kind: str, detail: str, size_out: int, config: Any) -> list[int]:
    """Return the sizes of the blocks that a column-parallel linear stacks."""
    if kind == "blocks":
        return [size_out // int(detail)] * int(detail)
    if kind == "qkv":
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        return [heads * head, groups * head, groups * head]
    return [size_out]


def _mark_partial(module: nn.Module, config: Any, axis: Axis) -> None:
    mark_partial_gradient(module)


def _copy_rope_channels(module: nn.Module, config: Any, axis: Axis) -> None:
    """The last channels of the output go to the heads of this rank without another linear."""

    def copy_last(_module: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
        rope = config.qk_rope_head_dim
        latent, keys = torch.split(y, [y.shape[-1] - rope, rope], -1)
        return torch.cat([latent, copy_to_tensor(keys, axis)], -1)

    module.register_forward_hook(copy_last)


def _shard_experts(module: nn.Module, config: Any, axis: Axis) -> None:
    """Each rank has a part of each expert: their outputs are summed."""
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError(
            f"{config.model_type} normalises the output of each expert, which is a sum over the "
            f"tensor ranks: use mesh.tensor = 1",
            on_every_rank=True,
        )
    if are_exchangeable(module):
        vars(module)["tensor_axis"] = axis
        if getattr(module, "down_proj_bias", None) is not None:
            _shard_parameter(module, "down_proj_bias", "dim:1", axis)
        return
    run = module.forward

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = run(copy_to_tensor(hidden, axis), index, copy_to_tensor(weights, axis))
        return reduce_from_tensor(y, axis)

    vars(module)["forward"] = forward


_IN_PLACE: dict[str, Callable[[nn.Module, Any, Axis], None]] = {
    # Its own parameters have styles; the module is as it is.
    "local_params": lambda module, config, axis: None,
    "replicated_with_grad_allreduce": _mark_partial,
    "mla_kv_a_proj": _copy_rope_channels,
    "moe_tp_experts": _shard_experts,
}


def _shard_parameter(layer: nn.Module, name: str, style: str, axis: Axis) -> None:
    path, _, last = name.rpartition(".")
    owner, parameter = layer.get_submodule(path), layer.get_parameter(name)
    kind, _, detail = style.partition(":")
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


# Rows per rank are a multiple of this number, if there are several tensor ranks.
_DIVISIBLE_BY = 8


def sharded_rows(like: Tensor, axis: Axis) -> nn.Parameter:
    """Return this rank's rows of a [vocabulary, ...] parameter, on meta, padded."""
    total, *rest = like.shape
    rows = rows_per_rank(total, axis.size, _DIVISIBLE_BY if axis.size > 1 else 1)
    start, stop = local_range(total, rows, axis.rank)
    shard = Shard((total, *rest), dim=0, ranges=((start, stop),) if start < stop else ())
    local = nn.Parameter(torch.empty(rows, *rest, dtype=like.dtype, device="meta"))
    return attach_shard(local, shard)


class _ShardedRows:
    """Put before the class of an embedding: looks up this rank's rows and sums over the ranks."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        require_in_vocabulary(ids, self._vocabulary, "token id")
        not_local = (ids < self._start) | (ids >= self._stop)
        rows = super().forward((ids - self._start).masked_fill(not_local, 0))  # type: ignore[misc]
        return reduce_from_tensor(rows.masked_fill(not_local.unsqueeze(-1), 0.0), self._axis)


def shard_embedding(module: Any, axis: Axis) -> None:
    """Shard the rows of an embedding in place, whatever else its class computes (scaling)."""
    if axis.size == 1:
        return
    module._axis, module._vocabulary = axis, module.num_embeddings
    module.weight = sharded_rows(module.weight, axis)
    rows = module.weight.shape[0]
    module._start, module._stop = local_range(module._vocabulary, rows, axis.rank)
    padding = module.padding_idx
    is_local = padding is not None and module._start <= padding < module._stop
    module.padding_idx = padding - module._start if is_local else None
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (_ShardedRows, kind), {})


class TableStub(ModuleStub):
    """An embedding that is not called here, but whose weight the head of this segment uses."""

    def __init__(self, embedding: nn.Module, axis: Axis) -> None:
        super().__init__(0, embedding, None)
        # An assignment would find the attribute of the replaced module.
        self._parameters["weight"] = sharded_rows(embedding.weight, axis)  # type: ignore[arg-type]


class ShardedHead(nn.Module):
    """hidden -> logits of this rank's slice of the vocabulary, with padding.

    Args:
        linear: the head of the unsharded model, on meta.
        table: the module of the embedding, if head and embedding share one weight; else None.

    Attributes:
        deferred: a list for the outputs that are not computed: it takes them, and `forward` returns
            a tensor without a meaning. None: `forward` returns logits.

    Shape:
        hidden [..., hidden], equal on all tensor ranks  ->  [..., padded vocabulary / T]
    """

    product: Product = staticmethod(F.linear)
    # Set by split backward.
    weight_sink: GradientSink | None = None
    deferred: list[DeferredLogits] | None = None

    def __init__(self, linear: Any, axis: Axis, table: nn.Module | None = None) -> None:
        super().__init__()
        self.axis, self.out_features = axis, linear.out_features
        # Not a submodule: the table has its own name. `build_stages` may replace its weight.
        vars(self)["_table"] = table
        if table is None:
            self._parameters["weight"] = sharded_rows(linear.weight, axis)
        self.bias = None if linear.bias is None else sharded_rows(linear.bias, axis)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and vars(self)["_table"] is not None:
            return vars(self)["_table"].weight
        return super().__getattr__(name)

    @property
    def output_shard(self) -> OutputShard:
        """Declares the output as a slice of the vocabulary, with padding."""
        return OutputShard(self.axis, self.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        entering = copy_to_tensor(hidden, self.axis)
        if self.deferred is not None:
            self.deferred.append(DeferredLogits.of(self, entering, self.out_features))
            return hidden.detach()[..., :1]
        return self.product(entering, self.weight, self.bias)
