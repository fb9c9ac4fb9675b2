"""Generate text with a model on any mesh.

A GPT of `pipemega.models` keeps the keys and values of earlier tokens on the ranks of their layers
and heads, so that a new token costs the forward of one position. Other models run the whole
sequence for each token.

Generates tokens with a trained model: with the fastest method that the model and mesh allow.

Choice of the next token from logits, with the parameters of transformers' `generate`.

Generation by transformers' own `generate`, with its caches, in one process.
"""

import json
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
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
from pipemega.hf.hf_module import HFPipelineModule, unsplit_model
from pipemega.hf.placeholders import import_transformers
from pipemega.models.gpt import is_cacheable, key_value_caches
from pipemega.pipeline.model.module import PipelineModule
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
    sampling, new = Sampling(temperature, top_k, top_p, seed), list[int]()
    stream = token_stream(engine, prompt, seq_length, vocab_size, sampling, use_cache=use_cache)
    with closing(stream):
        for token in islice(stream, num_tokens):
            new.append(token)
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


# Of the texts of a model without a largest number of positions.
_LONGEST = 1 << 20


class TextGenerator:
    """Generates tokens with one model.

        GPT of pipemega.models            caches of keys and values, on any mesh
        transformers, in one process      transformers' own generate, with its caches
        other models                      the whole sequence for each token

    Args:
        net: the model that `engine` was built from.
        vocab_size: vocabulary size of the model; None: it has no tokens.

    Attributes:
        context_length: largest number of tokens that the model sees.
        end_tokens: ids of the tokens that end a text, as the model of transformers says.

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
        """Return how many tokens can follow a prompt: each token needs a position."""
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
