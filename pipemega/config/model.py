"""`model`: the sizes and choices of the built-in GPT, by Megatron's names.  Floor 1."""

from typing import Literal

from pydantic import model_validator

from pipemega.config.keys import (
    Auto,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Section,
    own,
)

# SwiGLU has three matrices where GELU has two: 2/3 of 4h keeps their size, and a multiple of this
# keeps the kernels happy.
_SWIGLU_MULTIPLE = 64


class ModelSection(Section):
    """The model that `pretrain_gpt.py` builds; leave it out to bring a `PipelineModule`."""

    type: Literal["gpt"] = own("gpt", "The family.")
    num_layers: Count = own(..., "Transformer blocks.")
    hidden_size: Count = own(..., "Width between the blocks.")
    num_attention_heads: Count = own(..., "Heads of the queries.")
    ffn_hidden_size: Count | None = own(
        None,
        "Width inside the feed-forward block; null: 4 * hidden_size, or with swiglu "
        "8/3 * hidden_size rounded up to a multiple of 64.",
    )
    num_query_groups: Count | None = own(
        None, "Heads of the keys and values; null: as many as of the queries."
    )
    kv_channels: Count | None = own(
        None, "Size of one head; null: hidden_size / num_attention_heads."
    )
    seq_length: Count = own(..., "Tokens in a sample.")
    vocab_size: Count | Auto = own("auto", 'Tokens that exist; `"auto"`: those of the tokenizer.')
    make_vocab_size_divisible_by: Count = own(
        128,
        "The vocabulary is padded inside to a multiple of this times `mesh.tensor`; the padding "
        "is masked in the loss and not saved.",
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = own(
        "learned_absolute", "A table of positions, or rotary embeddings."
    )
    rotary_base: Positive = own(10000.0, "Base of the rotary frequencies.")
    rotary_percent: float = own(1.0, "Share of each head that is rotated.", gt=0, le=1)
    normalization: Literal["LayerNorm", "RMSNorm"] = own("LayerNorm", "The norm in the blocks.")
    norm_epsilon: Positive = own(1e-5, "Added to the variance in the norms.")
    swiglu: bool = own(False, "SwiGLU in place of GELU.")
    add_bias_linear: bool = own(True, "Biases in the linear layers.")
    add_qkv_bias: bool = own(False, "A bias for queries, keys, values even so.")
    untie_embeddings_and_output_weights: bool = own(
        False, "A matrix of its own for the head, and not that of the embedding."
    )
    attention_dropout: Fraction = own(0.1, "Dropout on the attention weights.")
    hidden_dropout: Fraction = own(0.1, "Dropout on embeddings and residuals.")
    init_method_std: NotNegative = own(0.02, "Spread of the weights at the start.")
    recompute: Literal["none", "selective", "full"] = own(
        "none", "What is computed again in the backward pass: the attention, or whole blocks."
    )
    label_smoothing: Fraction = own(0.0, "Share of the target spread over the vocabulary.")

    @property
    def feed_forward_size(self) -> int:
        """`ffn_hidden_size`, worked out where it is null."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if not self.swiglu:
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    @property
    def query_groups(self) -> int:
        """`num_query_groups`, worked out where it is null."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """`kv_channels`, worked out where it is null."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelSection":
        heads, hidden, groups = self.num_attention_heads, self.hidden_size, self.query_groups
        if self.kv_channels is None and hidden % heads:
            raise ValueError(
                f"model.hidden_size ({hidden}) must be a multiple of model.num_attention_heads "
                f"({heads}): the nearest {near_multiples(hidden, heads)}; or give model.kv_channels"
            )
        if heads % groups:
            raise ValueError(
                f"model.num_attention_heads ({heads}) must be a multiple of "
                f"model.num_query_groups ({groups}): each group serves as many heads"
            )
        rotated = round(self.head_size * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated < 2 or rotated % 2):
            raise ValueError(
                f"rotary positions turn pairs, and {rotated} channels of each head would be "
                f"turned (a head of {self.head_size}, model.rotary_percent {self.rotary_percent}): "
                "make that an even number"
            )
        return self


def near_multiples(size: int, of: int) -> str:
    """`that fits is 4`, or `that fit are 12 and 16`."""
    below, above = size // of * of, -(-size // of) * of
    return f"that fit are {below} and {above}" if below else f"that fits is {above}"
