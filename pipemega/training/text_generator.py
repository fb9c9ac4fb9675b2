"""Generates tokens with a trained model: with the fastest method that the model and mesh allow."""

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.unsplit_model import unsplit_model
from pipemega.pipeline.module import PipelineModule
from pipemega.training.generate import token_stream
from pipemega.training.hf_generation import generate_with_transformers
from pipemega.training.sampling import Sampling

# Of the texts of a model without a largest number of positions.
_LONGEST = 1 << 20


class TextGenerator:
    """Generates tokens with one model.

        GPT of pipemega.models            caches of keys and values, on any mesh
        transformers, in one process      transformers' own generate, with its caches
        other models                      the whole sequence for each token

    Args:
        net: the model that `engine` was built from.
        vocab_size: of the model; None: it has no tokens.

    Attributes:
        context_length: largest number of tokens that the model sees.
        end_tokens: that end a text, as the model of transformers says.

    Raises:
        ConfigError: the model does not generate text.
    """

    def __init__(self, engine: Engine, net: PipelineModule, vocab_size: int | None) -> None:
        model = engine.config.model
        length = None if model is None else model.sample_tokens()
        self.end_tokens: tuple[int, ...] = ()
        if isinstance(net, HFPipelineModule):
            _check_generates(net)
            positions = getattr(net.hf_config.get_text_config(), "max_position_embeddings", None)
            # An encoder-decoder may have neither; its relative positions have no largest one.
            length = positions or length or _LONGEST
            self.end_tokens = _end_tokens(net)
        if length is None or vocab_size is None:
            raise ConfigError(
                f"model.type {model.type if model else None!r} has no token ids, so it does not "
                f"generate text",
                on_every_rank=True,
            )
        self._engine, self._net, self._vocab_size = engine, net, vocab_size
        self.context_length = length

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: Sampling,
        stop: Collection[int] = (),
        on_token: Callable[[int], object] = lambda token: None,
    ) -> list[int]:
        """Return the new tokens, the same on every rank; the last may be one of `stop`. Collective.

        Args:
            prompt: token ids, at least one.
            num_tokens: largest number of new tokens.
            on_token: called with each new token.

        Raises:
            ConfigError: the prompt has no tokens, or is longer than the positions of the model.
        """
        net = self._net
        if not isinstance(net, HFPipelineModule):
            return self._stream(prompt, num_tokens, sampling, stop, on_token)
        if not net.hf_config.is_encoder_decoder:
            num_tokens = min(num_tokens, self._room(len(prompt)))
        if self._engine.mesh.world.size == 1:
            return generate_with_transformers(
                self._unsplit, prompt, num_tokens, sampling, stop, on_token
            )
        if not net.hf_config.is_encoder_decoder:
            return self._stream(prompt, num_tokens, sampling, stop, on_token)
        start = net.hf_config.decoder_start_token_id
        encoder_ids = torch.tensor([list(prompt)])

        def with_prompt(ids: Tensor) -> dict[str, Tensor]:
            return {"input_ids": encoder_ids, "decoder_input_ids": ids}

        return self._stream([start], num_tokens, sampling, stop, on_token, with_prompt)

    def _room(self, prompt: int) -> int:
        """Return how many tokens can follow a prompt: those without a position cannot."""
        if prompt >= self.context_length:
            raise ConfigError(
                f"the prompt has {prompt} tokens, and the model has {self.context_length} "
                f"positions: shorten the prompt",
                on_every_rank=True,
            )
        return self.context_length - prompt

    def _stream(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: Sampling,
        stop: Collection[int],
        on_token: Callable[[int], object],
        as_inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[int]:
        new: list[int] = []
        stream = token_stream(
            self._engine,
            prompt,
            self.context_length,
            self._vocab_size,
            sampling,
            as_inputs=as_inputs,
        )
        with closing(stream):
            for token in islice(stream, num_tokens):
                new.append(token)
                on_token(token)
                if token in stop:
                    break
        return new

    @cached_property
    def _unsplit(self) -> Any:
        """The model of transformers, with the parameters of the engine's layers."""
        assert isinstance(self._net, HFPipelineModule)
        layers: dict[int, nn.Module] = {}
        for stage in self._engine.local_stages:
            assert isinstance(stage.layers, nn.ModuleDict)
            layers |= {int(position): layer for position, layer in stage.layers.items()}
        return unsplit_model(self._net, layers)


def _check_generates(net: HFPipelineModule) -> None:
    description = net.description
    if not description.model.can_generate() or description.main_input != "input_ids":
        raise ConfigError(
            f"{description.class_name} does not generate text from text: use a causal language "
            f"model, or an encoder-decoder whose input is text",
            on_every_rank=True,
        )


def _end_tokens(net: HFPipelineModule) -> tuple[int, ...]:
    """Return the ids that end a text: those of the generation config, which has more for a chat."""
    file = None if net.folder is None else net.folder / "generation_config.json"
    found = None
    if file is not None and file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", on_every_rank=True) from error
    found = getattr(net.hf_config, "eos_token_id", None) if found is None else found
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
