"""Generate text with a model on any mesh.

A GPT of `pipemega.models` keeps the keys and values of earlier tokens on the ranks of their layers
and heads, so that a new token costs the forward of one position. Other models run the whole
sequence for each token.

Generates tokens with a trained model; `hf.text_generation` for models of transformers.

Choice of the next token from logits, with the parameters of transformers' `generate`.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import broadcast
from pipemega.distributed.mesh import gather_objects
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, PipelineError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.models.gpt import is_cacheable, key_value_caches
from pipemega.training.validation import output_shard


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0: the most likely token; else the logits are divided by it before sampling.
        top_k: sample only from this many most likely tokens; None: from all.
        top_p: sample only from the fewest most likely tokens whose probabilities add up to this.
        seed: seed of the random numbers; equal seeds and logits give equal tokens.

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


# Sequences without caches are padded to a multiple of this, so that they have few shapes.
_PADDING = 64


def generate(
    engine: Engine,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_length: int,
    vocab_size: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 1234,
    stop: Collection[int] = (),
    use_cache: bool = True,
) -> list[int]:
    """Generate tokens after `prompt`.  Collective.

    Args:
        engine: its model maps token ids [1, sequence] to logits [1, sequence, vocabulary (/ T)].
        prompt: token ids, at least one; the context of a token is the last `seq_length` tokens
            before it.
        num_tokens: largest number of new tokens.
        temperature, top_k, top_p, seed: see `Sampling`.
        stop: generation ends after one of these tokens.
        use_cache: keep keys and values, which a GPT of `pipemega.models` can without sequence
            parallelism, until the context has `seq_length` tokens.

    Returns:
        The new tokens, the same on every rank; the last one may be one of `stop`.

    Raises:
        ConfigError: the prompt has no tokens, or an argument of the sampling is out of its range.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    stream = token_stream(engine, prompt, seq_length, vocab_size, sampling, use_cache=use_cache)
    return _first_tokens(stream, num_tokens, stop, lambda token: None)


def _first_tokens(
    stream: Generator[int, None, None],
    num_tokens: int,
    stop: Collection[int],
    on_token: Callable[[int], object],
) -> list[int]:
    """Return the tokens of `stream` up to one of `stop`, and at most `num_tokens`."""
    new: list[int] = []
    with closing(stream):
        for token in islice(stream, num_tokens):
            new.append(token)
            on_token(token)
            if token in stop:
                break
    return new


def token_stream(
    engine: Engine,
    prompt: Sequence[int],
    seq_length: int,
    vocab_size: int,
    sampling: Sampling,
    *,
    use_cache: bool = True,
    as_inputs: Callable[[Tensor], Any] | None = None,
) -> Generator[int, None, None]:
    """Yield one new token after the other, without end.  Collective.  Arguments: see `generate`.

    Close it (`contextlib.closing`) before the next call of the engine.

    Args:
        as_inputs: token ids [1, sequence] -> inputs of the model; None: the ids are its inputs.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens: give at least one", on_every_rank=True)
    next_token, tokens = _NextToken(engine, vocab_size, sampling), list(prompt)
    if use_cache and len(tokens) <= seq_length and _is_cacheable(engine):
        with key_value_caches(_layers(engine), seq_length):
            length = 0  # length of the caches
            while len(tokens) <= seq_length:
                new = torch.tensor([tokens[length:]])
                positions = torch.arange(length, len(tokens)).unsqueeze(0)
                length = len(tokens)
                tokens.append(next_token((new, positions), new.shape[1] - 1))
                yield tokens[-1]
    while True:
        window = tokens[-seq_length:]
        ids = _padded(window, seq_length)
        tokens.append(next_token(ids if as_inputs is None else as_inputs(ids), len(window) - 1))
        yield tokens[-1]


class _NextToken:
    """Runs the model on one sequence and chooses the next token; calls are collective."""

    def __init__(self, engine: Engine, vocab_size: int, sampling: Sampling) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._sampler = Sampler(sampling)
        with failure_reporter().propagate_errors("generate"):
            self._shard = output_shard(engine)

    def __call__(self, inputs: Any, place: int) -> int:
        """Return the token that follows position `place` of `inputs`; the same on every rank."""
        outputs = self._engine.infer([inputs])
        if outputs is None:
            return self._agreed(0)
        logits = outputs[0][:, place]  # [1, vocabulary (/ T)]
        logits = logits if self._shard is None else self._shard.gather(logits)
        synchronize()
        return self._agreed(self._sampler(logits[0, : self._vocab_size].float().cpu()))

    def _agreed(self, token: int) -> int:
        """Return the token of the last stage of the first data rank.

        Data ranks compute the same, but kernels of a GPU may round differently.
        """
        mesh = self._engine.mesh
        choice = torch.tensor([token], device=mesh.device)
        last = self._engine.plan.rank_of_stage[-1]
        for axis, source in ((mesh.pipeline, last), (mesh.data, 0)):
            if axis.size > 1:
                broadcast(choice, axis.ranks[source], axis)
        synchronize()
        return int(choice.item())


def _padded(window: Sequence[int], seq_length: int) -> Tensor:
    """Return the tokens, padded at the end: with causal attention this changes nothing before.

    To `seq_length`, which sequence parallelism can split, or to a multiple of 64 below it.
    """
    length = min(-(-len(window) // _PADDING) * _PADDING, seq_length)
    padded = torch.zeros(1, length, dtype=torch.int64)
    padded[0, : len(window)] = torch.tensor(window)
    return padded


def _layers(engine: Engine) -> Iterator[nn.Module]:
    for stage in engine.local_stages:
        assert isinstance(stage.layers, nn.ModuleDict)
        yield from stage.layers.values()


def _is_cacheable(engine: Engine) -> bool:
    """Return whether all layers of all ranks can continue a sequence; collective."""
    mesh = engine.mesh
    # One token cannot be split over the tensor ranks.
    splits = engine.config.mesh.sequence_parallel and mesh.tensor.size > 1
    return all(gather_objects(not splits and is_cacheable(_layers(engine)), mesh.world))


class TextGenerator:
    """Generates tokens with one model.

        GPT of pipemega.models            caches of keys and values, on any mesh
        other models                      the whole sequence for each token

    Args:
        engine: the engine of the model.
        vocab_size: the vocabulary size of the model; None: it has no tokens.
        positions: the number of positions of the model; None: use the tokens of a sample.
        longest: the context length of a model that has neither.

    Attributes:
        context_length: largest number of tokens that the model sees.
        end_tokens: the ids that end a text, besides the end tokens of the tokenizer.

    Raises:
        ConfigError: the model does not generate text.
    """

    end_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        engine: Engine,
        vocab_size: int | None,
        positions: int | None = None,
        longest: int | None = None,
    ) -> None:
        model = engine.config.model
        length = positions or (None if model is None else model.sample_tokens()) or longest
        if length is None or vocab_size is None:
            raise ConfigError(
                f"model.type {model.type if model else None!r} has no token ids, so it does not "
                f"generate text",
                on_every_rank=True,
            )
        self._engine, self._vocab_size = engine, vocab_size
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
            ConfigError: the prompt has no tokens.
        """
        return self._stream(prompt, num_tokens, sampling, stop, on_token)

    def _stream(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: Sampling,
        stop: Collection[int],
        on_token: Callable[[int], object],
        as_inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[int]:
        sizes = self.context_length, self._vocab_size
        stream = token_stream(self._engine, prompt, *sizes, sampling, as_inputs=as_inputs)
        return _first_tokens(stream, num_tokens, stop, on_token)
