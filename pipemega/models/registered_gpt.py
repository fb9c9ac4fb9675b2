"""The built-in GPT as a registered model type: what its section of the config delegates to."""

from typing import Any

import torch

from pipemega.config.model import GPTSection
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.models.build_model import ModelContext
from pipemega.models.gpt import gpt
from pipemega.models.gpt_config import GPTConfig
from pipemega.models.layer_inputs import layer_inputs
from pipemega.monitor import gpt_flops_per_token
from pipemega.pipeline.module import PipelineModule


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
        ffn_hidden_size=section.feed_forward_size,
        seq_length=section.seq_length,
        vocab_size=known_vocabulary_size(context),
        num_query_groups=section.query_groups,
        kv_channels=section.head_size,
        swiglu=section.swiglu,
    )
