"""Sizes and options of the transformer blocks that the GPT and the ViT share."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipemega.config.model import GPTSection
from pipemega.models.rope_frequencies import RopeScaling
from pipemega.pipeline.recompute import ActivationCheckpoints


def gpt_default(name: str) -> Any:
    """Return the default of a key of `GPTSection`."""
    return GPTSection.model_fields[name].default


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options of the blocks with Megatron's names; defaults are those of `GPTSection`.

    Args:
        causal: a position sees itself and earlier ones; else all.
        padded_from: first position that is padding, which makes the sequence a multiple of the
            tensor ranks; None: there is none.
    """

    first_block: ClassVar[int]
    """Position of the first block in the pipeline."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    position_embedding_type: Literal["learned_absolute", "rope"] = gpt_default(
        "position_embedding_type"
    )
    rotary_base: float = gpt_default("rotary_base")
    rotary_percent: float = gpt_default("rotary_percent")
    rope_scaling: RopeScaling | None = None
    qk_layernorm: bool = gpt_default("qk_layernorm")
    squared_relu: bool = gpt_default("squared_relu")
    normalization: Literal["LayerNorm", "RMSNorm"] = gpt_default("normalization")
    norm_epsilon: float = gpt_default("norm_epsilon")
    swiglu: bool = gpt_default("swiglu")
    add_bias_linear: bool = gpt_default("add_bias_linear")
    add_qkv_bias: bool = gpt_default("add_qkv_bias")
    attention_dropout: float = gpt_default("attention_dropout")
    hidden_dropout: float = gpt_default("hidden_dropout")
    init_method_std: float = gpt_default("init_method_std")
    recompute: Literal["none", "selective", "full"] = gpt_default("recompute")
    recompute_method: Literal["uniform", "block"] | None = gpt_default("recompute_method")
    recompute_num_layers: int = gpt_default("recompute_num_layers")
    sequence_parallel: bool = False
    causal: bool = True
    padded_from: int | None = None

    @property
    def checkpoints(self) -> ActivationCheckpoints | None:
        """The blocks that are recomputed; None: not whole blocks."""
        if self.recompute != "full":
            return None
        number, method = self.recompute_num_layers, self.recompute_method
        return ActivationCheckpoints(
            self.first_block,
            self.first_block + self.num_layers,
            size=number if method == "uniform" else 1,
            most=number if method == "block" else None,
        )
