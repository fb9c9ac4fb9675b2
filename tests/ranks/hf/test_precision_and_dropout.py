"""Initial values, dropout and half precision of Hugging Face models on several ranks."""

from typing import Any

import numpy
import pytest

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

from tests.ranks.hf import split_runs, tiny_models
from tests.ranks.pool import RankPool


def largest_difference(got: dict[str, Any], want: dict[str, Any]) -> float:
    assert set(got) == set(want)
    return max(float(numpy.abs(got[n] - want[n]).max()) for n in want)


@pytest.mark.parametrize(
    "family",
    ["t5", *(pytest.param(f, marks=pytest.mark.sweep) for f in tiny_models.CONFIGS if f != "t5")],
)
def test_a_model_from_scratch_has_the_same_values_on_every_mesh(
    pool: RankPool, family: str
) -> None:
    (whole,) = pool.run(1, split_runs.initial_values, family, (1, 1))
    split = pool.run(4, split_runs.initial_values, family, (2, 2))[0]
    assert set(whole) == set(split)
    for name, value in whole.items():
        assert numpy.array_equal(value, split[name]), name
        assert numpy.isfinite(value).all(), name


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_dropout_of_hidden_states_has_the_same_masks_on_every_mesh(
    pool: RankPool, sequence_parallel: bool
) -> None:
    changes = {"resid_pdrop": 0.3, "embd_pdrop": 0.2}
    case = {"family": "gpt2", "schedule": "1f1b", "changes": changes}
    (whole,) = pool.run(1, split_runs.one_step_with, case | {"mesh": (1, 1)})
    split = pool.run(
        2,
        split_runs.one_step_with,
        case | {"mesh": (1, 2), "sequence_parallel": sequence_parallel},
    )[0]
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert largest_difference(split["gradients"], whole["gradients"]) < 1e-12


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.sweep), "sdpa"])
def test_recomputation_repeats_the_dropout_of_sharded_heads(pool: RankPool, attention: str) -> None:
    changes = {"attn_pdrop": 0.3, "resid_pdrop": 0.3}
    case = {"family": "gpt2", "schedule": "1f1b", "changes": changes, "mesh": (1, 2)}
    case["attention"] = attention
    keys = {"pipeline": {"schedule": "1f1b", "activation_checkpoint_interval": 1}}
    kept = pool.run(2, split_runs.one_step_with, case)[0]
    recomputed = pool.run(2, split_runs.one_step_with, case | {"keys": keys})[0]
    assert recomputed["loss"] == kept["loss"]
    for name, gradient in kept["gradients"].items():
        assert numpy.array_equal(recomputed["gradients"][name], gradient), name


@pytest.mark.parametrize(
    ("family", "precision", "in_fp32"),
    [
        ("t5", "fp16", "DenseReluDense.wo.weight"),
        ("gpt-oss", "bf16", None),
        pytest.param("gpt-oss", "fp16", "norm.weight", marks=pytest.mark.sweep),
        *(
            pytest.param(family, "bf16", None, marks=pytest.mark.sweep)
            for family in tiny_models.CONFIGS
            if family != "gpt-oss"
        ),
    ],
)
def test_half_precision_keeps_the_parameters_in_fp32_that_transformers_keeps(
    pool: RankPool, family: str, precision: str, in_fp32: str | None
) -> None:
    results = pool.run(4, split_runs.half_precision_step, family, (2, 2), precision)
    want = tiny_models.oracle(tiny_models.config_of(family))["loss"]
    half = "torch.float16" if precision == "fp16" else "torch.bfloat16"
    for result in results:
        assert result["loss"] == pytest.approx(want, rel=0.05)
        for name, dtype in result["dtypes"].items():
            kept = in_fp32 is not None and name.endswith(in_fp32)
            assert dtype == ("torch.float32" if kept else half), name
    found = [n for result in results for n in result["dtypes"]]
    assert in_fp32 is None or any(name.endswith(in_fp32) for name in found)


def test_evaluation_without_gradients_sends_the_output_of_the_encoder(pool: RankPool) -> None:
    got = pool.run(2, split_runs.evaluation_loss, "t5", (2, 1))
    want = tiny_models.oracle(tiny_models.config_of("t5"))["loss"]
    assert got == pytest.approx([want] * 2, rel=1e-10)


def test_embeddings_can_be_given_in_place_of_tokens(pool: RankPool) -> None:
    got = pool.run(2, split_runs.evaluation_loss, "llama", (2, 1), True)
    want = tiny_models.oracle(tiny_models.config_of("llama"))["loss"]
    assert got == pytest.approx([want] * 2, rel=1e-10)
