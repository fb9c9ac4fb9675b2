"""Loads the model to plan, with one micro-batch, on the meta device."""

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.config import Config
from pipemega.data.data_files import Vocabulary, known_vocabulary
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError, PipemegaError
from pipemega.models.build_model import (
    ModelContext,
    build_from,
    model_section,
    sample_from,
)
from pipemega.pipeline.module import PipelineModule

# The vocabulary of GPT-2.
_ASSUMED_VOCABULARY = 50257

_USAGE = (
    "write --model MODULE:FUNCTION, where FUNCTION(micro_batch_size) returns "
    "(PipelineModule, inputs, labels)"
)


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs and labels of one micro-batch, on the meta device.

    Args:
        label_ranks: the pipeline ranks that have labels; None: every rank.
    """

    inputs: Any
    labels: Any
    label_ranks: frozenset[int] | None = None

    @classmethod
    def like(cls, inputs: Any, labels: Any) -> "Sample":
        """Return a sample with the shapes of real tensors."""
        return cls(_to_meta(inputs), _to_meta(labels))


def model_and_sample(config: Config, topology: Topology) -> tuple[PipelineModule, Sample]:
    """Return the model of the section `model`, and one micro-batch for it.

    Raises:
        ConfigError: the section is missing, or its type cannot build the model.
        DataError: a tokenizer is damaged.
    """
    if config.model is None:
        raise ConfigError(
            f"the config has no section 'model', which describes the model; for a model in Python "
            f"{_USAGE}"
        )
    context = meta_context(config, topology)
    return build_from(context).on_meta(), Sample(*sample_from(context))


def meta_context(config: Config, topology: Topology) -> ModelContext:
    """Return the context in which a model is planned; its vocabulary may be assumed."""
    return ModelContext.of(config, topology, vocab_size=vocabulary_of(config).size)


def count_layers(config: Config, topology: Topology) -> int:
    """Return the number of pipeline layers of the section `model`; builds no layer."""
    return len(build_from(meta_context(config, topology)))


def vocabulary_of(config: Config) -> Vocabulary:
    """Return the vocabulary size of the model: from the config, the tokenizer, or assumed.

    Raises:
        DataError: a tokenizer is damaged.
    """
    own = model_section(config).vocabulary()
    if isinstance(own, int):
        return Vocabulary(own, "model.vocab_size")
    found = known_vocabulary(config.data)
    if found is not None:
        return found
    path = config.data.tokenizer
    where = f"{path} does not exist here" if path else "is unknown"
    origin = f"GPT-2's, because model.vocab_size is 'auto' and the tokenizer {where}"
    # A model without a vocabulary gets the number and has no use for it.
    return Vocabulary(_ASSUMED_VOCABULARY, origin, is_certain=own is None)


def user_model_and_sample(path: str, micro_batch_size: int) -> tuple[PipelineModule, Sample]:
    """Call FUNCTION of `MODULE:FUNCTION` under the meta device and return its model.

    Raises:
        ConfigError: the function cannot be found, fails, or returns something else.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--model {path!r} names no function: {_USAGE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
        with torch.device("meta"):
            returned = function(micro_batch_size)
    except PipemegaError:
        raise
    except Exception as error:
        raise ConfigError(f"--model {path!r} failed: {type(error).__name__}: {error}") from error
    if not (
        isinstance(returned, tuple)
        and len(returned) == 3
        and isinstance(returned[0], PipelineModule)
    ):
        raise ConfigError(f"--model {path!r} returned {type(returned).__name__}: {_USAGE}")
    net, inputs, labels = returned
    return net, Sample.like(inputs, labels)


def _to_meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), tree)
