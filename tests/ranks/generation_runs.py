"""Generates tokens with a small GPT on any mesh."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pipemega.engine.engine import Engine
from pipemega.models.transformer_block import Block
from pipemega.training import generate
from tests.ranks import training_runs

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "experts": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 8,
        "moe_layer_freq": [0, 1, 1],
    },
    "megatron": {
        "position_embedding_type": "rope",
        "embedding_norm": True,
        "qk_layernorm": True,
        "squared_relu": True,
        "pad_vocab_size_to": 60,
    },
}


def trained_engine(style: str, **changes: Any) -> Engine:
    """Return the engine of a GPT of this style after one step."""
    model = {"init_method_std": 0.3, **STYLES[style]}
    engine = training_runs.build(training_runs.settings(model=model, **changes))
    engine.train_batch(training_runs.data(engine, 0))
    return engine


def blocks(engine: Engine) -> Iterator[Block]:
    return (module for module in engine.module.modules() if isinstance(module, Block))


def tokens(
    style: str,
    temperature: float,
    mesh: Mapping[str, Any] | None = None,
    vocabulary: str = "auto",
) -> list[list[int]]:
    """Return the tokens with caches, and without."""
    torch.set_default_dtype(torch.float64)
    try:
        pipeline = {"vocabulary": vocabulary}
        engine = trained_engine(style, mesh=dict(mesh or {}), pipeline=pipeline)
        sizes = {"seq_length": training_runs.LENGTH, "vocab_size": training_runs.VOCAB}
        return [
            generate(engine, [3, 1, 4], 9, temperature=temperature, use_cache=cache, **sizes)
            for cache in (True, False)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
