"""Generates text with a Hugging Face model.

transformers, in one process      transformers' own `generate`, with its caches
on several ranks                  the whole sequence for each token
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.hf.hf_module import HFPipelineModule, unsplit_model
from pipemega.hf.placeholders import import_transformers
from pipemega.pipeline.model.module import PipelineModule
from pipemega.training.generation import Sampler, Sampling, TextGenerator


class _Choice:
    """A logits processor that leaves only the token that a sampler has chosen.

    So tokens do not depend on the number of ranks, as they would with transformers' sampling.
    """

    def __init__(self, sampler: Sampler, on_token: Callable[[int], object]) -> None:
        self._sampler, self._on_token = sampler, on_token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._sampler(scores[0].float().cpu())
        self._on_token(token)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token] = 0.0
        return chosen


@torch.inference_mode()
def generate_with_transformers(
    model: Any,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    stop: Collection[int],
    on_token: Callable[[int], object],
) -> list[int]:
    """Return the new tokens; the last one may be one of `stop`.

    Args:
        model: a transformers model that can generate; an encoder gets the prompt.
    """
    transformers = import_transformers()
    ids = model.generation_config
    settings = transformers.GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
        bos_token_id=ids.bos_token_id,
        eos_token_id=list(stop) or None,
        pad_token_id=next(iter(stop), 0),
        decoder_start_token_id=ids.decoder_start_token_id,
    )
    inputs = torch.tensor([list(prompt)], device=model.device)
    processors = transformers.LogitsProcessorList([_Choice(Sampler(sampling), on_token)])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=settings,
        logits_processor=processors,
    )
    before = 1 if model.config.is_encoder_decoder else len(prompt)
    return [int(token) for token in output[0, before:]]


# Of the texts of a model without a largest number of positions.
_LONGEST = 1 << 20


class HFTextGenerator(TextGenerator):
    """Generates tokens with a Hugging Face model; see `TextGenerator`.

    Args:
        net: the model that `engine` was built from.
    """

    def __init__(self, engine: Engine, net: HFPipelineModule, vocab_size: int | None) -> None:
        _check_generates(net)
        positions = getattr(net.hf_config.get_text_config(), "max_position_embeddings", None)
        # Of an encoder-decoder: its relative positions have no largest one.
        super().__init__(engine, vocab_size, positions, _LONGEST)
        self._net, self.end_tokens = net, _end_tokens(net)

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: Sampling,
        stop: Collection[int] = (),
        on_token: Callable[[int], object] = lambda token: None,
    ) -> list[int]:
        """Return the new tokens; see `TextGenerator.generate`.

        Raises:
            ConfigError: the prompt has no tokens, or is longer than the positions of the model.
        """
        config = self._net.hf_config
        if not config.is_encoder_decoder:
            num_tokens = min(num_tokens, self._room(len(prompt)))
        if self._engine.mesh.world.size == 1:
            return generate_with_transformers(
                self._unsplit, prompt, num_tokens, sampling, stop, on_token
            )
        if not config.is_encoder_decoder:
            return self._stream(prompt, num_tokens, sampling, stop, on_token)
        encoder_ids = torch.tensor([list(prompt)])

        def with_prompt(ids: Tensor) -> dict[str, Tensor]:
            return {"input_ids": encoder_ids, "decoder_input_ids": ids}

        start = config.decoder_start_token_id
        return self._stream([start], num_tokens, sampling, stop, on_token, with_prompt)

    def _room(self, prompt: int) -> int:
        """Return how many tokens can follow a prompt: each token needs a position."""
        if prompt >= self.context_length:
            raise ConfigError(
                f"the prompt has {prompt} tokens, and the model has {self.context_length} "
                f"positions: shorten the prompt",
                on_every_rank=True,
            )
        return self.context_length - prompt

    @cached_property
    def _unsplit(self) -> Any:
        """The model of transformers, with the parameters of the engine's layers."""
        layers: dict[int, nn.Module] = {}
        for stage in self._engine.local_stages:
            assert isinstance(stage.layers, nn.ModuleDict)
            layers |= {int(position): layer for position, layer in stage.layers.items()}
        return unsplit_model(self._net, layers)


def text_generator(engine: Engine, net: PipelineModule, vocab_size: int | None) -> TextGenerator:
    """Return what generates text with the model `net`; arguments as of `HFTextGenerator`."""
    if isinstance(net, HFPipelineModule):
        return HFTextGenerator(engine, net, vocab_size)
    return TextGenerator(engine, vocab_size)


def _check_generates(net: HFPipelineModule) -> None:
    description = net.description
    if not description.model.can_generate() or description.main_input != "input_ids":
        raise ConfigError(
            f"{description.class_name} does not generate text from text: use a causal language "
            f"model, or an encoder-decoder whose input is text",
            on_every_rank=True,
        )


def _end_tokens(net: HFPipelineModule) -> tuple[int, ...]:
    """Return the ids that end a text, from the generation config, which has more for a chat."""
    file = None if net.folder is None else net.folder / "generation_config.json"
    found = None
    if file is not None and file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", on_every_rank=True) from error
    found = getattr(net.hf_config, "eos_token_id", None) if found is None else found
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
