"""Sizes and options of a GPT."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from pipemega.config import Config
from pipemega.config.model import GPTSection
from pipemega.errors import ConfigError
from pipemega.models.rope_frequencies import RopeScaling
from pipemega.parameters import even_share
from pipemega.pipeline.recompute import ActivationCheckpoints

FIRST_BLOCK = 2
"""Position of the first block; the token embedding and the positions precede it."""


def _default(name: str) -> Any:
    return GPTSection.model_fields[name].default


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a GPT with Megatron's names; defaults are those of `GPTSection`."""

    vocab_size: int
    seq_length: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    make_vocab_size_divisible_by: int = _default("make_vocab_size_divisible_by")
    position_embedding_type: Literal["learned_absolute", "rope"] = _default(
        "position_embedding_type"
    )
    rotary_base: float = _default("rotary_base")
    rotary_percent: float = _default("rotary_percent")
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int | None = None
    embedding_norm: bool = _default("embedding_norm")
    qk_layernorm: bool = _default("qk_layernorm")
    squared_relu: bool = _default("squared_relu")
    normalization: Literal["LayerNorm", "RMSNorm"] = _default("normalization")
    norm_epsilon: float = _default("norm_epsilon")
    swiglu: bool = _default("swiglu")
    add_bias_linear: bool = _default("add_bias_linear")
    add_qkv_bias: bool = _default("add_qkv_bias")
    untie_embeddings_and_output_weights: bool = _default("untie_embeddings_and_output_weights")
    attention_dropout: float = _default("attention_dropout")
    hidden_dropout: float = _default("hidden_dropout")
    init_method_std: float = _default("init_method_std")
    label_smoothing: float = _default("label_smoothing")
    z_loss: float = _default("z_loss")
    recompute: Literal["none", "selective", "full"] = _default("recompute")
    recompute_method: Literal["uniform", "block"] | None = _default("recompute_method")
    recompute_num_layers: int = _default("recompute_num_layers")
    sequence_parallel: bool = False

    @property
    def num_positions(self) -> int:
        """`max_position_embeddings`, or its default if it is None."""
        return self.max_position_embeddings or self.seq_length

    @property
    def checkpoints(self) -> ActivationCheckpoints | None:
        """The blocks that are recomputed, which are the layers 2 to num_layers + 1."""
        if self.recompute != "full":
            return None
        number, method = self.recompute_num_layers, self.recompute_method
        return ActivationCheckpoints(
            FIRST_BLOCK,
            FIRST_BLOCK + self.num_layers,
            size=number if method == "uniform" else 1,
            most=number if method == "block" else None,
        )

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
                "sequence_parallel": config.mesh.sequence_parallel and config.mesh.tensor > 1,
            }
        )
