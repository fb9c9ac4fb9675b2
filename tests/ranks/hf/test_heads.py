"""Heads without logits, and heads cut over the pipeline, have transformers' loss and gradients.

In float64, all parameters, to 1e-10 of the largest gradient. Some labels are -100, in one
micro-batch all of them.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

from tests.ranks.hf import tiny_models
from tests.ranks.hf.test_families import assert_equal_to_hf, check
from tests.ranks.hf.weight_runs import built_in_gpt_step
from tests.ranks.pool import RankPool

# Tied and untied heads; gemma2 caps and cohere scales the logits, so they are computed.
FAMILIES = [
    "gpt2",
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "cohere",
    "gpt-oss",
]
MESHES = [(1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama-tied", (2, 2)),
        *(pytest.param(f, mesh, marks=pytest.mark.sweep) for f in FAMILIES for mesh in MESHES),
    ],
)
def test_a_microbatch_without_labels_that_count_changes_nothing(
    pool: RankPool, family: str, mesh: tuple[int, int]
) -> None:
    schedule = "sequential" if mesh == (1, 1) else "zb-h1"
    check(pool, family, mesh, schedule, "ignored")


# What the built-in GPT can have the weights of.
IMPORTED: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_function": "gelu"},
    "llama": {},
    "llama-tied": {"mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3-moe": {"mlp_only_layers": [2], "norm_topk_prob": True},
}


@pytest.mark.parametrize("vocabulary", [pytest.param("stage", marks=pytest.mark.sweep), "parallel"])
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", (2, 1)),
        ("gpt2", (2, 2)),
        ("mixtral", (1, 1, 2)),
        pytest.param("qwen3-moe", (2, 1, 2), marks=pytest.mark.sweep),
        pytest.param("mixtral", (1, 2, 2), marks=pytest.mark.sweep),
        *(pytest.param(f, mesh, marks=pytest.mark.sweep) for f in IMPORTED for mesh in MESHES),
    ],
)
def test_the_built_in_gpt_has_the_gradients_of_transformers(
    pool: RankPool, tmp_path: Path, family: str, mesh: tuple[int, ...], vocabulary: str
) -> None:
    transformers.utils.logging.disable_progress_bar()
    config = tiny_models.config_of(family, **IMPORTED[family])
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_models.whole_model(config)
        model.save_pretrained(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    rotary_base = None if family == "gpt2" else config.rope_parameters["rope_theta"]
    want = tiny_models.oracle(config, "ignored", rotary_base=rotary_base)
    pipeline = {"schedule": "1f1b" if mesh[0] == 1 else "zb-v", "vocabulary": vocabulary}
    for got in pool.run(math.prod(mesh), built_in_gpt_step, str(tmp_path), family, mesh, pipeline):
        assert_equal_to_hf(got, want)
