"""Generation with key-value caches equals generation without them."""

from typing import Any

import pytest
import torch

from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.training import generate
from tests.ranks import generation_runs, training_runs

STYLES = ["gpt2", "llama", "megatron"]


@pytest.fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class RecordedInputs:
    """Records the lengths of the sequences that an engine runs, and its last logits."""

    def __init__(self, engine: Engine) -> None:
        self.lengths: list[int] = []
        self.logits: list[torch.Tensor] = []
        self._infer = engine.infer
        engine.infer = self  # type: ignore[method-assign, assignment]

    def __call__(self, inputs: Any) -> Any:
        tokens = inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0]
        self.lengths.append(tokens.shape[1])
        outputs = self._infer(inputs)
        self.logits.append(outputs[0])
        return outputs


@pytest.mark.parametrize("style", STYLES)
def test_a_cache_gives_the_logits_and_tokens_of_the_whole_sequence(style):
    engine = generation_runs.trained_engine(style)
    recorded = RecordedInputs(engine)
    prompt, count = [3, 1, 4], 5
    sizes = {"seq_length": training_runs.LENGTH, "vocab_size": training_runs.VOCAB}
    cached = generate(engine, prompt, count, **sizes)
    assert recorded.lengths == [3, 1, 1, 1, 1], "only new positions are computed"
    of_cache = [logits[0, -1] for logits in recorded.logits]
    recorded.logits.clear()
    assert generate(engine, prompt, count, use_cache=False, **sizes) == cached
    for i, logits in enumerate(recorded.logits):
        torch.testing.assert_close(of_cache[i], logits[0, 2 + i], rtol=1e-10, atol=1e-10)
    assert all(block.attention.cache is None for block in generation_runs.blocks(engine))


@pytest.mark.parametrize("style", STYLES)
def test_a_context_longer_than_the_sequence_keeps_its_last_tokens(style):
    engine = generation_runs.trained_engine(style)
    sizes = {"seq_length": training_runs.LENGTH, "vocab_size": training_runs.VOCAB}
    cached = generate(engine, [3, 1, 4], 12, temperature=1.0, **sizes)
    whole = generate(engine, [3, 1, 4], 12, temperature=1.0, use_cache=False, **sizes)
    assert cached == whole
    long = [1, 2, 5, *range(8)]
    assert generate(engine, long, 3, **sizes) == generate(engine, long[-8:], 3, **sizes)


def test_generation_ends_after_a_stop_token():
    engine = generation_runs.trained_engine("gpt2")
    sizes = {"seq_length": training_runs.LENGTH, "vocab_size": training_runs.VOCAB}
    tokens = generate(engine, [3], 7, temperature=3.0, **sizes)
    assert len(set(tokens)) > 2
    stop = tokens[2]
    expected = tokens[: tokens.index(stop) + 1]
    assert generate(engine, [3], 7, temperature=3.0, stop=[stop], **sizes) == expected
    assert generate(engine, [3], 0, **sizes) == []


def test_a_prompt_without_tokens_is_refused():
    engine = generation_runs.trained_engine("gpt2")
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        generate(engine, [], 1, seq_length=8, vocab_size=training_runs.VOCAB)
