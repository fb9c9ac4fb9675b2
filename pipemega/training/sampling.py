"""Choice of the next token from logits, with the parameters of transformers' `generate`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipemega.errors import ConfigError, PipelineError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0: the most likely token; else the logits are divided by it before sampling.
        top_k: sample only from this many most likely tokens; None: from all.
        top_p: sample only from the fewest most likely tokens whose probabilities add up to this.
        seed: of the random numbers; equal seeds and logits give equal tokens.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = {
            f"temperature is {self.temperature:g}: use 0 for the most likely token, or a positive "
            "number": not 0 <= self.temperature < math.inf,
            f"top_k is {self.top_k}: use at least 1": self.top_k is not None and self.top_k < 1,
            f"top_p is {self.top_p:g}: use a number above 0, up to 1": not 0 < self.top_p <= 1,
            f"seed is {self.seed}: use a number between -2^63 and 2^63": abs(self.seed) >= 1 << 63,
        }
        for problem, exists in problems.items():
            if exists:
                raise ConfigError(problem, on_every_rank=True)


class Sampler:
    """Chooses one token after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """Return the id of the next token.

        Shape:
            logits [vocabulary], on the CPU

        Raises:
            PipelineError: a logit is nan.
        """
        if bool(logits.isnan().any()):
            raise PipelineError(
                "the model returns nan as a logit, so it cannot generate: its weights are damaged, "
                "or its training has diverged: take an earlier checkpoint (--tag)"
            )
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        probabilities = self.restricted(logits).softmax(0)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def restricted(self, logits: Tensor) -> Tensor:
        """Return the logits divided by the temperature; -inf for tokens that are not sampled.

        As in transformers: first the temperature, then `top_k`, then `top_p`.
        """
        sampling = self._sampling
        # The largest one is 0, so that none overflows with a small temperature.
        logits = (logits - logits.max()) / sampling.temperature
        if sampling.top_k is not None and sampling.top_k < logits.numel():
            least = logits.topk(sampling.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -math.inf)
        if sampling.top_p < 1.0:
            descending, order = logits.sort(descending=True, stable=True)
            before = descending.softmax(0).cumsum(0) - descending.softmax(0)
            # The most likely token has nothing before it, so it always stays.
            logits = logits.index_fill(0, order[before >= sampling.top_p], -math.inf)
        return logits
