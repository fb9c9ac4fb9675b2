"""Generation by transformers' own `generate`, with its caches, in one process."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipemega.hf.installed_transformers import import_transformers
from pipemega.training.sampling import Sampler, Sampling


class _Choice:
    """A logits processor that leaves only the token that a sampler has chosen.

    So tokens do not depend on the number of ranks, as those of transformers' sampling would.
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
    stop: Collection[int] = (),
    on_token: Callable[[int], object] = lambda token: None,
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
