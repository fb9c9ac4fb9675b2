"""Sizes and options of a GPT."""

from dataclasses import dataclass, fields
from typing import ClassVar

from pipemega.config import Config
from pipemega.config.model import GPTSection
from pipemega.errors import ConfigError
from pipemega.models.block_config import BlockConfig, gpt_default
from pipemega.models.rope_frequencies import RopeScaling
from pipemega.parameters import even_share

FIRST_BLOCK = 2
"""Position of the first block; the token embedding and the positions precede it."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """Sizes and options of a GPT with Megatron's names; defaults are those of `GPTSection`."""

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
                "sequence_parallel": config.mesh.sequence_parallel and config.mesh.tensor > 1,
            }
        )
