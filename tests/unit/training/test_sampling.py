"""The choice of the next token equals that of transformers."""

import math
from types import SimpleNamespace

import pytest
import torch

from pipemega.errors import ConfigError, PipelineError
from pipemega.hf.text_generation import _end_tokens
from pipemega.training.generation import Sampler, Sampling


def logits() -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, 1.0), (1.0, 5, 1.0), (1.3, None, 0.8), (0.5, 20, 0.9), (1.0, 99, 0.01)],
)
def test_the_sampled_tokens_are_those_of_transformers(temperature, top_k, top_p):
    transformers = pytest.importorskip("transformers")
    scores = logits()[None]
    processors = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        processors.append(transformers.TopKLogitsWarper(top_k))
    processors.append(transformers.TopPLogitsWarper(top_p))
    for process in processors:
        scores = process(None, scores)
    ours = Sampler(Sampling(temperature, top_k, top_p)).restricted(logits())
    # Ours are shifted, which changes no probability.
    torch.testing.assert_close(ours.softmax(0), scores[0].softmax(0))
    assert ours.isfinite().sum() < 50 or (top_k is None and top_p == 1.0)


def test_temperature_0_takes_the_most_likely_token():
    sampler = Sampler(Sampling(top_k=1, top_p=0.5))
    assert {sampler(logits()) for _ in range(3)} == {int(logits().argmax())}


def test_equal_seeds_give_equal_tokens_and_other_seeds_others():
    def tokens(seed: int) -> list[int]:
        sampler = Sampler(Sampling(2.0, seed=seed))
        return [sampler(logits()) for _ in range(8)]

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1: use 0 for the most likely token"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0: use at least 1"),
        ({"top_p": 0.0}, "top_p is 0: use a number above 0, up to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_refused(temperature):
    damaged = logits()
    damaged[3] = float("nan")
    with pytest.raises(PipelineError, match=r"returns nan as a logit.* take an earlier checkpoint"):
        Sampler(Sampling(temperature))(damaged)


def test_a_damaged_generation_config_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{bad")
    net = SimpleNamespace(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read: Expecting"):
        _end_tokens(net)
