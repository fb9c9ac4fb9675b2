"""Scaled rotary positions equal those of transformers; wrong keys are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipemega.config import load
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.errors import ConfigError
from pipemega.models import GPTConfig
from pipemega.models.rotary import Rotary

LENGTH, ORIGINAL, HEAD = 64, 16, 12

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "old name": {"type": "linear", "factor": 2.5},
    "dynamic": {
        "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, options": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, attention factor": {
        "rope_type": "yarn", "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.7, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip


def config_of(scaling: dict[str, Any] | None, **model: Any) -> dict[str, Any]:
    section = {
        "num_layers": 1, "hidden_size": 24, "num_attention_heads": 2, "seq_length": LENGTH,
        "vocab_size": 32, "position_embedding_type": "rope", "rotary_base": 500.0,
        "normalization": "RMSNorm", "swiglu": True, "rope_scaling": scaling,
    }  # fmt: skip
    return {"train_batch_size": 1, "model": section | model}


def rotary_of(name: str) -> Rotary:
    config = GPTConfig.of(load(config_of(SCALINGS[name])), 32)
    return Rotary(config.kv_channels, config.rotary_base, config.rope_scaling)


class Float64(TorchFunctionMode):
    """Replaces float32 by float64, also in conversions from integers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        wide = {torch.float32: torch.float64}

        def widened(value: Any) -> Any:
            return wide.get(value, value) if isinstance(value, torch.dtype) else value

        named = {key: widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(widened, args), **named)


def rotated_by_transformers(scaling: dict[str, Any], q: Tensor, positions: Tensor) -> Tensor:
    """Rotate with the Llama of transformers in fp64."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    from pipemega.hf.weights.gpt_export import gpt_to_export

    section = load(config_of(scaling)).model
    assert isinstance(section, GPTSection)
    config = gpt_to_export(section, 32).config
    assert isinstance(config, LlamaConfig)
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
            rotated: Tensor = llama.apply_rotary_pos_emb(q, q, cos, sin)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    return rotated


@pytest.mark.parametrize("length", [ORIGINAL - 3, LENGTH])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotated_queries_are_those_of_transformers(name: str, length: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    q = torch.randn(2, 2, length, HEAD, dtype=torch.float64)
    counted = torch.arange(length).expand(2, length)
    wanted = rotated_by_transformers(SCALINGS[name], q, counted)
    layer = rotary_of(name)
    for positions in (None, counted):
        torch.testing.assert_close(layer(q, q, positions)[0], wanted, rtol=0, atol=1e-12)
    plain = Rotary(HEAD, 500.0)(q, q, None)[0]
    same = name == "default" or (name == "dynamic" and length < ORIGINAL)
    assert torch.equal(layer(q, q, None)[0], plain) == same


def test_dynamic_scaling_depends_on_the_length_of_each_micro_batch_alone() -> None:
    """transformers keeps the longest length that it has seen."""
    layer, q = rotary_of("dynamic"), torch.randn(1, 1, LENGTH, HEAD, dtype=torch.float64)
    short = layer(q[:, :, :20], q[:, :, :20], None)[0]
    layer(q, q, None)
    assert torch.equal(layer(q[:, :, :20], q[:, :, :20], None)[0], short)
    restarted = torch.arange(20).repeat(1, 4)[:, :LENGTH]
    assert torch.equal(layer(q, q, restarted)[0][:, :, :20], short)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "model.rope_scaling.factor is missing: rope_type 'linear' needs"),
        ({"rope_type": "linear", "factor": 0.5}, "factor (0.5) must be at least 1"),
        (
            {"rope_type": "linear", "factor": 2, "beta_fast": 3.0},
            "model.rope_scaling.beta_fast has no effect on rope_type 'linear', only on yarn: "
            "remove it",
        ),
        (
            {"rope_type": "dynamic", "factor": 2},
            "original_max_position_embeddings is missing: rope_type 'dynamic' needs it",
        ),
        (
            {
                "rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
                "original_max_position_embeddings": 8,
            },
            "low_freq_factor (4) must be below high_freq_factor (1)",
        ),
        (
            {"rope_type": "longrope"},
            'rope_type must be "default" or "linear" or "dynamic" or "yarn" or "llama3"',
        ),
        (
            {"rope_type": "linear", "factor": 2, "rope_theta": 1e6},
            "rope_theta is model.rotary_base here: move its value there",
        ),
        (
            {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            "partial_rotary_factor is model.rotary_percent here",
        ),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(config_of(scaling))
    assert message in str(error.value)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_resolved_config_with_scaling_loads_again(name: str) -> None:
    """Checkpoints contain the resolved config, with the defaults of all keys."""
    config = load(config_of(SCALINGS[name]))
    assert load(config.to_dict()).model == config.model


def test_scaling_without_rope_is_refused() -> None:
    config = config_of(SCALINGS["linear"], position_embedding_type="learned_absolute")
    with pytest.raises(
        ConfigError, match=r"model.rope_scaling has no effect on model.position_emb"
    ):
        load(config)
