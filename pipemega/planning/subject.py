"""What is planned: the model and a micro-batch of it, on the meta device."""

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.errors import ConfigError, PipemegaError
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.module import PipelineModule
from pipemega.planning.layout import Sample

_HOW = (
    "write --model MODULE:FUNCTION, where FUNCTION(micro_batch_size) returns "
    "(PipelineModule, inputs, labels)"
)


def gpt_and_sample(config: Config, micro_batch_size: int) -> tuple[PipelineModule, Sample]:
    """The GPT of the section `model`, and tokens for it.

    Raises:
        ConfigError: there is no such section, or it leaves the size of the vocabulary open.
    """
    if config.model is None:
        raise ConfigError(
            f"the config has no section 'model', which says what GPT to build; for a model of "
            f"your own {_HOW}"
        )
    net = gpt(GPTConfig.of(config, _vocab_size(config)))
    shape = (micro_batch_size, config.model.seq_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    inputs: Any = (tokens, tokens.clone()) if config.data.reset_position_ids else tokens
    return net, Sample(inputs, torch.empty_like(tokens))


def _vocab_size(config: Config) -> int:
    assert config.model is not None
    if isinstance(config.model.vocab_size, int):
        return config.model.vocab_size
    if config.data.corpus is not None and config.data.tokenizer is None:
        return config.data.vocab_size
    raise ConfigError(
        "model.vocab_size is 'auto', which the tokenizer says when the run starts: give it here, "
        "as in --set model.vocab_size=50257"
    )


def model_and_sample(path: str, micro_batch_size: int) -> tuple[PipelineModule, Sample]:
    """A user's model: FUNCTION of `MODULE:FUNCTION`, called under the meta device.

    Raises:
        ConfigError: it cannot be found or called, or returns something else.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--model {path!r} names no function: {_HOW}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
        with torch.device("meta"):
            made = function(micro_batch_size)
    except PipemegaError:
        raise
    except Exception as error:
        raise ConfigError(f"--model {path!r} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], PipelineModule)):
        raise ConfigError(f"--model {path!r} returned {type(made).__name__}: {_HOW}")
    net, inputs, labels = made
    return net, Sample(_on_meta(inputs), _on_meta(labels))


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), tree)
