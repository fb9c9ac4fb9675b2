"""GPT as a list of LayerSpecs, in GPT-2 or Llama style.

    GPT-2 style   learned positions, LayerNorm, GELU, biases, tied head
    Llama style   rotary positions, RMSNorm, SwiGLU, no biases, grouped queries, untied head

    position      0           1           2 .. L+1     L+2    L+3
    layer         embedding   positions   blocks       norm   head

The message between layers is `hidden` [batch, sequence, hidden] (a slice of the sequence under
sequence parallelism); (hidden, positions) if position ids restart at each document; or (hidden,
positions, documents) if moreover no token sees another document. Positions and documents are
[batch, sequence].

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama); Su et al.
2021, arXiv:2104.09864 (rotary positions); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).

How the GPT is cut for vocabulary parallelism: layers without the embedding and the head.

Sizes and options of a GPT.

The built-in GPT as a registered model type: what its section of the config delegates to.

The inputs of the layers of the GPT, for `pipeline.shapes: "declared"`.

Turns the key-value caches of a GPT's attention on and off.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import Config
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, DataError
from pipemega.kernels import Kernels
from pipemega.models.attention import KeyValueCache, documents_of
from pipemega.models.build_model import ModelContext
from pipemega.models.rotary import RopeScaling
from pipemega.models.transformer_block import (
    Attention,
    Block,
    BlockConfig,
    Hidden,
    gpt_default,
    hidden_norm,
)
from pipemega.moe.router import RouterConfig
from pipemega.monitor import gpt_flops_per_token
from pipemega.parameters import Shard, attach_shard, even_share, normal
from pipemega.pipeline.messages import collect_gradients
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import EXPERT_AXIS, TENSOR_AXIS, LayerSpec, TiedLayerSpec
from pipemega.pipeline.model.vocabulary_shard import EmbeddedInputs, VocabularySplit
from pipemega.tensor_parallel import (
    DeferredLogits,
    Dropout,
    VocabParallelEmbedding,
    VocabParallelHead,
    cross_entropy_sum,
)
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    copy_to_tensor,
    gather_sequence,
    reduce_scatter_sequence,
    slice_of,
    sum_in_place,
)
from pipemega.tensor_parallel.cross_entropy import TokenObjective
from pipemega.tensor_parallel.deferred_logits import OutputShard

FIRST_BLOCK = 2
"""Position of the first block; the token embedding and the positions precede it."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """Sizes and options of a GPT with Megatron's names; the defaults come from `GPTSection`."""

    first_block: ClassVar[int] = FIRST_BLOCK

    vocab_size: int
    seq_length: int
    make_vocab_size_divisible_by: int = gpt_default("make_vocab_size_divisible_by")
    max_position_embeddings: int | None = None
    embedding_norm: bool = gpt_default("embedding_norm")
    untie_embeddings_and_output_weights: bool = gpt_default("untie_embeddings_and_output_weights")
    label_smoothing: float = gpt_default("label_smoothing")
    z_loss: float = gpt_default("z_loss")

    @property
    def num_positions(self) -> int:
        """`max_position_embeddings`, or its default if it is None."""
        return self.max_position_embeddings or self.seq_length

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "GPTConfig":
        """Return the GPT of the sections `model` and `mesh`, with the vocabulary of the data.

        Raises:
            ConfigError: the section `model` is missing, the heads do not divide by mesh.tensor, or
                the vocabulary is larger than `pad_vocab_size_to`.
        """
        section = config.model
        if not isinstance(section, GPTSection):
            found = "is missing" if section is None else f"has the type {section.type!r}"
            raise ConfigError(f"the section 'model' {found}, and a GPT needs the type 'gpt'")
        ranks = config.mesh.tensor
        even_share(section.num_attention_heads, ranks, "model.num_attention_heads")
        even_share(section.query_groups, ranks, "model.num_query_groups")
        divisor = section.make_vocab_size_divisible_by
        if section.pad_vocab_size_to is not None:
            for error in section.padding_errors(vocab_size):
                raise ConfigError(error, on_every_rank=True)
            divisor = even_share(section.pad_vocab_size_to, ranks, "model.pad_vocab_size_to")
        own, scaling = {f.name for f in fields(cls)}, None
        if section.rope_scaling is not None:
            scaling = RopeScaling(section.rope_scaling, section.num_positions)
        return cls(
            **{key: value for key, value in section.model_dump().items() if key in own}
            | {
                "vocab_size": vocab_size,
                "make_vocab_size_divisible_by": divisor,
                "ffn_hidden_size": section.feed_forward_size,
                "num_query_groups": section.query_groups,
                "kv_channels": section.head_size,
                "rope_scaling": scaling,
                **_expert_options(section),
                "sequence_parallel": config.mesh.sequence_parallel and config.mesh.tensor > 1,
            }
        )


def _expert_options(section: GPTSection) -> dict[str, Any]:
    """Return the options of `BlockConfig` for experts."""
    s = section
    if s.num_experts is None:
        return {}
    router = RouterConfig(
        num_experts=s.num_experts,
        topk=s.moe_router_topk,
        score_function=s.moe_router_score_function,
        pre_softmax=s.moe_router_pre_softmax,
        num_groups=s.moe_router_num_groups,
        group_topk=s.moe_router_group_topk,
        topk_scaling_factor=s.moe_router_topk_scaling_factor,
        load_balancing_type=s.moe_router_load_balancing_type,
        aux_loss_coeff=s.moe_aux_loss_coeff,
        z_loss_coeff=s.moe_z_loss_coeff,
        expert_bias=s.moe_router_enable_expert_bias,
        bias_update_rate=s.moe_router_bias_update_rate,
    )
    return {
        "experts": router,
        "expert_layers": s.expert_layers,
        "expert_ffn_hidden_size": s.expert_size,
        "shared_expert_size": s.moe_shared_expert_intermediate_size,
        "shared_expert_gate": s.moe_shared_expert_gate,
    }


def gpt_vocabulary(config: GPTConfig, per_token: Any) -> VocabularySplit:
    """Return the cut of a GPT.

    Args:
        per_token: inputs of the model -> (token ids, what the blocks need of each token).
    """
    c = config
    return VocabularySplit(
        embedding=LayerSpec(EmbeddedTokens, c, per_token, TENSOR_AXIS),
        head=LayerSpec(WholeHidden, c, TENSOR_AXIS),
        mean_loss=LayerSpec(SumOfTokenLosses, c),
        token_ids=lambda inputs: per_token(inputs)[0],
        token_loss=TokenObjective(c.vocab_size, c.label_smoothing, c.z_loss),
        hidden_size=c.hidden_size,
    )


class EmbeddedTokens(nn.Module):
    """In place of the embedding: sums the rows that the tensor ranks have found.

    Shape:
        (inputs, rows [batch, sequence, hidden])  ->  the output of the embedding
    """

    def __init__(
        self, config: GPTConfig, per_token: Any, axis: Axis, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._per_token, self._axis = per_token, axis
        self._hidden_size, self._sequence_parallel = config.hidden_size, config.sequence_parallel
        self._dtype = dtype or torch.get_default_dtype()

    def forward(self, inputs: Any) -> Hidden:
        if isinstance(inputs, EmbeddedInputs):
            (_, *per_token), rows = self._per_token(inputs.inputs), inputs.rows
        else:  # the planner has only the inputs
            ids, *per_token = self._per_token(inputs)
            zeros = torch.zeros(*ids.shape, self._hidden_size, dtype=self._dtype, device=ids.device)
            # As in a run, autograd does not keep rows that no layer saves: they are no leaf.
            rows, _ = collect_gradients(zeros.requires_grad_())
        if self._axis.size > 1:
            reduce = reduce_scatter_sequence if self._sequence_parallel else sum_in_place
            rows = reduce(rows, self._axis)
        return (rows, *per_token) if per_token else rows


class WholeHidden(nn.Module):
    """In place of the head: the whole sequence on every tensor rank.

    Backward sums the gradients of the tensor ranks, each of which has other rows of the head.
    """

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._sequence_parallel = axis, config.sequence_parallel
        # Of the logits that the passes compute where the caller needs them.
        self.output_shard = OutputShard(axis, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._axis.size == 1:
            return hidden
        return (gather_sequence if self._sequence_parallel else copy_to_tensor)(hidden, self._axis)


class SumOfTokenLosses(nn.Module):
    """Maps the losses of the tokens and the labels to the loss of `GPTLoss`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self._length = config.seq_length
        self.weight_of_labels = _label_weight(config)

    def forward(self, losses: Tensor, labels: Tensor) -> WeightedLoss:
        num_tokens = (labels != -100).sum().to(losses.dtype)
        return WeightedLoss(losses.sum() / self._length, num_tokens / self._length)


def _label_weight(config: GPTConfig) -> Callable[[Tensor], float] | None:
    """Return what computes the weight of the loss from labels, if auxiliary losses need it."""
    router, length = config.experts, config.seq_length
    if router is None or not (router.aux_loss_coeff or router.z_loss_coeff):
        return None
    return lambda labels: int((labels != -100).sum()) / length


GPTInputs = Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]


def gpt(
    config: GPTConfig, kernels: Kernels | None = None, *, boundary: Any = None
) -> PipelineModule:
    """Return the model with its loss; labels are token ids, or -100 for ignored tokens.

    Args:
        kernels: selects the norms; torch's by default.
        boundary: see `PipelineModule`.
    """
    kernels = kernels or Kernels.detect("cpu")
    c, init_method = config, normal(config.init_method_std)
    vocabulary: dict[str, Any] = {
        "axis": TENSOR_AXIS,
        "divisible_by": c.make_vocab_size_divisible_by,
        "init_method": init_method,
        "sequence_parallel": c.sequence_parallel,
    }

    def vocabulary_layer(layer: type[nn.Module]) -> LayerSpec:
        if c.untie_embeddings_and_output_weights:
            return LayerSpec(layer, c.vocab_size, c.hidden_size, **vocabulary)
        return TiedLayerSpec("words", layer, c.vocab_size, c.hidden_size, **vocabulary)

    net = PipelineModule(
        [
            vocabulary_layer(TokenEmbedding),
            LayerSpec(Positions, c, kernels, TENSOR_AXIS),
            *(
                LayerSpec(Block, c, kernels, TENSOR_AXIS, *((EXPERT_AXIS,) if has_experts else ()))
                for has_experts in c.expert_layers or (False,) * c.num_layers
            ),
            LayerSpec(FinalNorm, c, kernels, TENSOR_AXIS),
            vocabulary_layer(VocabParallelHead),
        ],
        loss_fn=LayerSpec(GPTLoss, c, TENSOR_AXIS),
        boundary=boundary,
    )
    net.checkpoints, net.sample_tokens = c.checkpoints, c.seq_length
    net.vocabulary = gpt_vocabulary(c, _per_token)
    return net


class TokenEmbedding(VocabParallelEmbedding):
    """Maps token ids to hidden.

    The inputs are token ids; (token ids, positions), in which a token sees all earlier ones; or a
    dict with transformers' names: `input_ids`, `position_ids` and `attention_mask`. A dict with
    `position_ids` has several documents, each of which starts where the positions do not continue,
    and no token sees another document. `attention_mask` is 0 for padding.

    Shape:
        ids, positions, attention_mask [batch, sequence]  ->  hidden [batch, sequence (/ T), hidden]
        and what the other layers need of each token; see above
    """

    def forward(self, inputs: GPTInputs) -> Hidden:  # type: ignore[override]
        tokens, *per_token = _per_token(inputs)
        hidden = super().forward(tokens)
        return (hidden, *per_token) if per_token else hidden


def _per_token(inputs: GPTInputs) -> tuple[Tensor, ...]:
    """Return the token ids, and what the blocks need of each token."""
    if isinstance(inputs, dict):
        _refuse_foreign_inputs(inputs)
        tokens, positions = inputs["input_ids"], inputs.get("position_ids")
        documents = documents_of(positions, inputs.get("attention_mask"))
        if positions is None and documents is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return (tokens, *(x for x in (positions, documents) if x is not None))
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _refuse_foreign_inputs(inputs: dict[str, Tensor]) -> None:
    foreign = sorted(inputs.keys() - {"input_ids", "position_ids", "attention_mask"})
    if "input_ids" not in inputs or foreign:
        raise DataError(
            "the GPT takes input_ids, and optionally position_ids and attention_mask, but the "
            f"inputs of this batch are {', '.join(sorted(inputs))}"
        )


class Positions(nn.Module):
    """Normalizes the token embeddings and adds learned positions, if configured; then dropout.

    Shape:
        hidden [batch, sequence (/ T), hidden]  ->  the same
    """

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        c = config
        self._axis, self._sequence_parallel = axis, c.sequence_parallel
        self.norm = hidden_norm(c, kernels) if c.embedding_norm else None
        self.dropout = Dropout(c.hidden_dropout, axis=axis, sequence_parallel=c.sequence_parallel)
        self.weight: nn.Parameter | None = None
        if c.position_embedding_type == "learned_absolute":
            shape, init_method = (c.num_positions, c.hidden_size), normal(c.init_method_std)
            shard = Shard(shape, partial_gradient=c.sequence_parallel, init_method=init_method)
            self.weight = attach_shard(nn.Parameter(torch.empty(shape)), shard)

    def forward(self, inputs: Hidden) -> Hidden:
        hidden, *per_token = inputs if isinstance(inputs, tuple) else (inputs,)
        if self.norm is not None:
            hidden = self.norm(hidden)
        hidden = self.dropout(self._added(hidden, *per_token))
        return (hidden, *per_token) if per_token else hidden

    def _added(self, hidden: Tensor, positions: Tensor | None = None, *_: Tensor) -> Tensor:
        if self.weight is None:
            return hidden
        if positions is None:
            length = hidden.shape[1] * (self._axis.size if self._sequence_parallel else 1)
            _check_length(length, self.weight.shape[0])
            added = self.weight[:length].unsqueeze(0)
        else:
            added = F.embedding(positions, self.weight)
        if self._sequence_parallel:
            # The reduction of partial gradients sums the gradient of the slices over the ranks.
            added = slice_of(added, self._axis, SEQUENCE_DIM)
        return hidden + added


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"a sample has {length} tokens, and the model has positions for "
            f"model.max_position_embeddings = {limit}: shorten the samples, or increase it"
        )


class FinalNorm(nn.Module):
    """The norm before the head; drops what the blocks need of each token."""

    def __init__(self, config: GPTConfig, kernels: Kernels, axis: Axis) -> None:
        super().__init__()
        self.norm = hidden_norm(config, kernels)

    def forward(self, inputs: Hidden) -> Tensor:
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.norm(hidden)  # type: ignore[no-any-return]


class GPTLoss(nn.Module):
    """Cross entropy over a vocabulary that is sharded over the tensor ranks.

    Takes logits, or the input of the head, whose logits are then never in memory as a whole.
    Returns the sum of the token losses and the number of tokens that are not ignored, both divided
    by the sequence length: the weight of a micro-batch is about its number of samples, which fits
    fp16.
    """

    takes_deferred_logits = True

    def __init__(self, config: GPTConfig, axis: Axis) -> None:
        super().__init__()
        self._axis, self._config = axis, config
        self.weight_of_labels = _label_weight(config)

    def forward(self, logits: Tensor | DeferredLogits, labels: Tensor) -> WeightedLoss:
        c = self._config
        total = cross_entropy_sum(
            logits,
            labels,
            axis=self._axis,
            vocab_size=c.vocab_size,
            factor=1 / c.seq_length,
            label_smoothing=c.label_smoothing,
            z_loss=c.z_loss,
        )
        return WeightedLoss(total, (labels != -100).sum().to(total.dtype) / c.seq_length)


def layer_inputs(
    config: GPTConfig,
    micro_batch_size: int,
    dtype: torch.dtype,
    *,
    tensor_ranks: int = 1,
    per_token: int = 0,
) -> Callable[[int], Any]:
    """Return a function of a layer's position to its input as meta tensors.

    Args:
        dtype: the dtype of the parameters.
        tensor_ranks: number of ranks that shard the sequence under sequence parallelism.
        per_token: numbers that the layers need of each token (`data.inputs_per_token`).

    Shape:
        hidden [micro-batch, sequence (/ T), hidden]; with `per_token` a tuple of it and positions
        (and documents), each [micro-batch, sequence]
    """
    c = config
    length = c.seq_length // tensor_ranks if c.sequence_parallel else c.seq_length
    hidden = torch.empty(
        micro_batch_size, length, c.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    number = torch.empty(micro_batch_size, c.seq_length, dtype=torch.int64, device="meta")
    message = (hidden, *(number.clone() for _ in range(per_token))) if per_token else hidden
    # Embedding, positions, blocks, norm; the norm drops the numbers per token.
    head = c.num_layers + 3

    def input_of(position: int) -> Any:
        return message if position < head else hidden

    return input_of


def build(section: GPTSection, context: ModelContext) -> PipelineModule:
    """Return the GPT."""
    config = GPTConfig.of(context.config, known_vocabulary_size(context))
    boundary = layer_inputs(
        config,
        micro_batch_size=context.micro_batch_size,
        dtype=context.dtype,
        tensor_ranks=context.tensor,
        per_token=context.config.data.inputs_per_token,
    )
    kernels = Kernels.detect("cpu" if context.device.type == "meta" else context.device)
    return gpt(config, kernels, boundary=boundary)


def known_vocabulary_size(context: ModelContext) -> int:
    """Return the vocabulary size.

    Raises:
        ConfigError: neither the section nor the data have it.
    """
    if context.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is 'auto', and there is no tokenizer to take it from: set it"
        )
    return context.vocab_size


def sample(section: GPTSection, context: ModelContext) -> tuple[Any, Any] | None:
    """Return token ids and labels, with what the data adds per token; None: it adds nothing."""
    tokens = torch.empty(context.micro_batch_size, section.seq_length, dtype=torch.int64)
    per_token = context.config.data.inputs_per_token
    if per_token == 1:
        return (tokens, torch.empty_like(tokens)), torch.empty_like(tokens)
    if per_token == 2:
        inputs = {"input_ids": tokens, "position_ids": torch.empty_like(tokens)}
        return inputs, torch.empty_like(tokens)
    return None


def flops_per_token(section: GPTSection, context: ModelContext) -> float:
    """Return the FLOPs of forward and backward per token, without recomputation."""
    return gpt_flops_per_token(
        num_layers=section.num_layers,
        hidden_size=section.hidden_size,
        num_attention_heads=section.num_attention_heads,
        ffn_hidden_size=section.active_feed_forward_size,
        seq_length=section.seq_length,
        vocab_size=known_vocabulary_size(context),
        num_query_groups=section.query_groups,
        kv_channels=section.head_size,
        swiglu=section.swiglu,
    )


_LAYERS = (
    TokenEmbedding, Positions, Block, FinalNorm, VocabParallelHead,
    # In place of embedding and head, with vocabulary parallelism.
    EmbeddedTokens, WholeHidden,
)  # fmt: skip


def is_cacheable(layers: Iterable[nn.Module]) -> bool:
    """Return whether all layers are layers of a GPT, which can continue a sequence from caches."""
    return all(isinstance(layer, _LAYERS) for layer in layers)


@contextmanager
def key_value_caches(layers: Iterable[nn.Module], capacity: int) -> Iterator[None]:
    """Give each attention an empty cache; remove the caches at the end.

    Args:
        capacity: largest number of positions.
    """
    attentions = [
        module for layer in layers for module in layer.modules() if isinstance(module, Attention)
    ]
    for attention in attentions:
        attention.cache = KeyValueCache(capacity)
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None
