"""`model`: sizes and options of the built-in GPT, with Megatron's names."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pipemega.config.declarations import (
    Auto,
    Count,
    Fraction,
    NotNegative,
    Positive,
    own,
    rule,
)
from pipemega.config.model_registry import register_model
from pipemega.config.sections.expert_keys import ExpertKeys
from pipemega.config.sections.pipeline_sections import MeshSection
from pipemega.config.sections.transformer_sections import RopeScalingSection, near_multiples

# SwiGLU has three matrices and GELU two: 2/3 * 4h gives the same number of parameters. GEMM kernels
# are fast for multiples of this.
_SWIGLU_MULTIPLE = 64


@register_model("gpt")
class GPTSection(ExpertKeys):
    """The built-in GPT."""

    builder = "pipemega.models.gpt"
    other_layers = ("embedding", "positions", "norm", "head")

    type: Literal["gpt"] = own("gpt", "Type of the model.")
    ffn_hidden_size: Count | None = own(
        None,
        "Feed-forward size; null: 4 * hidden_size (swiglu: 8/3 * hidden_size, rounded up to a "
        "multiple of 64).",
    )
    num_query_groups: Count | None = own(None, "Key and value heads; null: num_attention_heads.")
    kv_channels: Count | None = own(None, "Head size; null: hidden_size / num_attention_heads.")
    seq_length: Count = own(..., "Tokens per sample.")
    max_position_embeddings: Count | None = own(
        None,
        "Positions of the model, at least seq_length: with learned position embeddings their "
        "number of rows, with rope_scaling the length of the longest sequence; null: seq_length.",
    )
    vocab_size: Count | Auto = own("auto", 'Vocabulary size; `"auto"`: the tokenizer\'s size.')
    make_vocab_size_divisible_by: Count = own(
        128,
        "Pad the vocabulary to a multiple of this * `mesh.tensor`; the padding is masked and not "
        "saved.",
    )
    pad_vocab_size_to: Count | None = own(
        None, "Pad the vocabulary to this size instead; a multiple of `mesh.tensor`."
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = own(
        "learned_absolute", "Learned position embeddings, or rotary position embeddings (RoPE)."
    )
    rotary_base: Positive = own(10000.0, "Base of the RoPE frequencies.")
    rotary_percent: float = own(1.0, "Fraction of a head that RoPE rotates.", gt=0, le=1)
    rope_scaling: RopeScalingSection | None = own(
        None, "Scaling of the RoPE frequencies, with the keys of transformers."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = own("LayerNorm", "Normalization layer.")
    norm_epsilon: Positive = own(1e-5, "Epsilon of the normalization layers.")
    embedding_norm: bool = own(
        False, "Normalize the token embeddings, as in BLOOM (Megatron's --embed-layernorm)."
    )
    qk_layernorm: bool = own(
        False, "Normalize queries and keys over the channels of each head, before RoPE."
    )
    document_attention: Literal["auto", "mask"] = own(
        "auto",
        "Attention of samples with several documents (`data.reset_attention_mask`, packing): "
        '`"mask"` computes all pairs of positions; `"auto"` skips other documents by '
        "flex_attention on GPUs with triton, without attention dropout.",
    )
    swiglu: bool = own(False, "Use SwiGLU instead of GELU.")
    squared_relu: bool = own(False, "Use the square of ReLU instead of GELU.")
    add_bias_linear: bool = own(True, "Add biases to the linear layers.")
    add_qkv_bias: bool = own(False, "Add QKV biases even if add_bias_linear is false.")
    untie_embeddings_and_output_weights: bool = own(False, "Give the output head its own weight.")
    init_method_std: NotNegative = own(0.02, "Standard deviation of the initial weights.")
    label_smoothing: Fraction = own(
        0.0, "Share of the target probability that is spread over the vocabulary."
    )
    z_loss: NotNegative = own(
        0.0, "Weight of the squared log-sum-exp of the logits, added to the loss (PaLM: 1e-4)."
    )

    @property
    def feed_forward_size(self) -> int:
        """`ffn_hidden_size`, or its default if it is null."""
        if self.ffn_hidden_size is not None or not self.swiglu:
            return super().feed_forward_size
        return -(-8 * self.hidden_size // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    @property
    def num_positions(self) -> int:
        """`max_position_embeddings`, or its default if it is null."""
        return self.max_position_embeddings or self.seq_length

    @property
    def query_groups(self) -> int:
        """`num_query_groups`, or its default if it is null."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """`kv_channels`, or its default if it is null."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def sample(self, context: Any) -> Any:
        return self.above("sample")(self, context)

    def flops_per_token(self, context: Any) -> Any:
        return self.above("flops_per_token")(self, context)

    def sharded_sizes(self, mesh: MeshSection) -> Mapping[str, int]:
        sharded = {**super().sharded_sizes(mesh)}
        if mesh.sequence_parallel:
            sharded["seq_length"] = self.seq_length
        if self.query_groups != self.num_attention_heads:
            sharded["num_query_groups"] = self.query_groups
        if self.pad_vocab_size_to is not None:
            sharded["pad_vocab_size_to"] = self.pad_vocab_size_to
        return sharded

    def padding_errors(self, vocab_size: int) -> Iterator[str]:
        """Yield why a vocabulary of this size cannot be padded to `pad_vocab_size_to`."""
        size = self.pad_vocab_size_to
        if size is not None and size < vocab_size:
            yield (
                f"model.pad_vocab_size_to ({size}) must be at least the size of the vocabulary "
                f"({vocab_size})"
            )

    def computed_values(self) -> Iterator[tuple[str, str, str]]:
        if self.ffn_hidden_size is None:
            factor = "8/3, up to a multiple of 64" if self.swiglu else "4"
            why = f"hidden_size {self.hidden_size} x {factor}"
            yield "model.ffn_hidden_size", str(self.feed_forward_size), why
        if self.max_position_embeddings is None:
            yield "model.max_position_embeddings", str(self.num_positions), "seq_length"
        if self.num_query_groups is None:
            yield "model.num_query_groups", str(self.query_groups), "num_attention_heads"
        if self.kv_channels is None:
            why = f"hidden_size {self.hidden_size} / {self.num_attention_heads} heads"
            yield "model.kv_channels", str(self.head_size), why

    @rule("hidden_size", "num_attention_heads", "kv_channels")
    def _heads_divide_the_hidden_size(self) -> Iterator[str]:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.kv_channels is None and hidden % heads:
            yield (
                f"model.hidden_size ({hidden}) must be a multiple of model.num_attention_heads "
                f"({heads}): the nearest {near_multiples(hidden, heads)}; or give model.kv_channels"
            )

    @rule("num_query_groups", "num_attention_heads")
    def _groups_divide_the_heads(self) -> Iterator[str]:
        heads, groups = self.num_attention_heads, self.query_groups
        if heads % groups:
            yield (
                f"model.num_attention_heads ({heads}) must be a multiple of "
                f"model.num_query_groups ({groups}): all groups have the same number of heads"
            )

    @rule("max_position_embeddings", "seq_length")
    def _samples_fit_the_positions(self) -> Iterator[str]:
        if self.num_positions < self.seq_length:
            yield (
                f"model.max_position_embeddings ({self.num_positions}) must be at least "
                f"model.seq_length ({self.seq_length}): the tokens of a sample need positions"
            )

    @rule("pad_vocab_size_to", "vocab_size")
    def _vocabulary_fits_its_padding(self) -> Iterator[str]:
        if isinstance(self.vocab_size, int):
            yield from self.padding_errors(self.vocab_size)

    @rule("squared_relu", "swiglu")
    def _one_activation(self) -> Iterator[str]:
        if self.squared_relu and self.swiglu:
            yield (
                "model.squared_relu and model.swiglu are two activation functions of the "
                "feed-forward layers: set one of them to false"
            )

    @rule("rope_scaling", "position_embedding_type")
    def _scaling_needs_rope(self) -> Iterator[str]:
        if self.rope_scaling is not None and self.position_embedding_type != "rope":
            yield (
                "model.rope_scaling has no effect on model.position_embedding_type "
                f"'{self.position_embedding_type}': set it to 'rope', or remove the scaling"
            )

    @rule("rotary_percent", "position_embedding_type", "hidden_size", "num_attention_heads",
          "kv_channels")  # fmt: skip
    def _rope_rotates_pairs(self) -> Iterator[str]:
        rotated = round(self.head_size * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated < 2 or rotated % 2):
            yield (
                f"RoPE rotates pairs of channels, and {rotated} channels of each head would be "
                f"rotated (head size {self.head_size} * model.rotary_percent "
                f"{self.rotary_percent}): this number must be even"
            )
