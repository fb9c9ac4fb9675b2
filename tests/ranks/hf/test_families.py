"""Every family, split over pipeline and tensor ranks, has the gradients of HF's unsplit model.

In float64, all parameters, to 1e-10 of the largest gradient. By default some families run on four
ranks with a split backward; `pytest -m sweep` runs all families on all meshes and schedules.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

from tests.ranks.hf import split_runs, tiny_models
from tests.ranks.hf.tiny_models import EXPERTS
from tests.ranks.pool import RankPool
from tests.sampling import some, some_cases

ALL = list(tiny_models.CONFIGS)
CLASSIFIERS = tiny_models.CLASSIFIERS
# One of each kind: tied, experts with other parameters around, transposed weights, encoder-decoder.
DEFAULT = ["llama-tied", "gpt-oss", "t5"]
MESHES = {(2, 1): "1f1b", (1, 2): "1f1b", (2, 2): "zb-v"}
# Tensors that transformers stores transposed.
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

Case = tuple[Any, ...]


@cache
def wanted(family: str, side: str, attention: str, changes: tuple[Any, ...]) -> dict[str, Any]:
    config = tiny_models.config_of(family, attention, **dict(changes))
    return tiny_models.oracle(config, side)


def assert_equal_to_hf(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-10)
    assert set(got["gradients"]) == set(want["gradients"])
    scale = max(numpy.abs(gradient).max() for gradient in want["gradients"].values())
    for name, gradient in want["gradients"].items():
        mine = got["gradients"][name]
        if name.startswith("transformer.h.") and name.endswith(TRANSPOSED):
            mine = mine.T
        assert numpy.abs(mine - gradient).max() < 1e-10 * scale, name


def check(
    pool: RankPool,
    family: str,
    mesh: tuple[int, ...],
    schedule: str,
    side: str = "plain",
    attention: str = "eager",
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    run = pool.run(
        math.prod(mesh[:3]),
        split_runs.one_step_with,
        dict(family=family, mesh=mesh, schedule=schedule, side=side, attention=attention,
             changes=changes, **options),
    )  # fmt: skip
    want = wanted(family, side, attention, tuple((changes or {}).items()))
    for got in run:
        assert_equal_to_hf(got, want)


@pytest.mark.parametrize("family", some(DEFAULT, 0, 1))
def test_a_split_model_has_the_gradients_of_the_unsplit_one(pool: RankPool, family: str) -> None:
    check(pool, family, (2, 2), "zb-v")


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt-oss", (2, 1, 2, 2)),
        ("deepseek-v3", (1, 2, 2, 2)),
        *(
            pytest.param(family, mesh, marks=pytest.mark.sweep)
            for family in EXPERTS
            for mesh in [(1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 4, 2), (1, 1, 4, 4)]
        ),
    ],
    ids=str,
)
def test_expert_ranks_have_the_gradients_of_the_unsplit_model(
    pool: RankPool, family: str, mesh: tuple[int, ...]
) -> None:
    """With an exchange of tokens in each layer, recomputed and with a split backward."""
    schedule = "zb-v" if mesh[0] > 1 else "1f1b"
    keys = {"pipeline": {"schedule": schedule, "activation_checkpoint_interval": 1}}
    check(pool, family, mesh, schedule, keys=keys if mesh[0] > 1 else {})


def test_expert_ranks_generate_the_tokens_of_one_process(pool: RankPool) -> None:
    (want,) = pool.run(1, split_runs.generated, "mixtral", (1, 1))
    assert len(set(want)) > 4
    assert pool.run(4, split_runs.generated, "mixtral", (1, 2, 2, 2)) == [want] * 4


LOSSES = (0.3, 0.05)


@cache
def wanted_with_losses(family: str) -> dict[str, Any]:
    return tiny_models.oracle(tiny_models.config_of(family), losses=LOSSES)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("deepseek-v3", (2, 1, 2, 2)),
        *(
            pytest.param(family, mesh, marks=pytest.mark.sweep)
            for family in EXPERTS
            for mesh in [(2, 1, 1, 1), (1, 1, 2, 1), (2, 1, 2, 2), (1, 2, 2, 2)]
        ),
    ],
    ids=str,
)
def test_auxiliary_losses_are_means_over_the_samples_of_the_step(
    pool: RankPool, tmp_path: Path, family: str, mesh: tuple[int, ...]
) -> None:
    """Some labels are ignored, so the weight of a sample in the loss is not 1."""
    arguments = {"family": family, "mesh": mesh, "schedule": "1f1b", "losses": LOSSES}
    arguments["folder"] = str(tmp_path)
    want = wanted_with_losses(family)
    results = pool.run(math.prod(mesh[:3]), split_runs.one_step_with, arguments)
    for got in results:
        assert_equal_to_hf(got, want)
    recorded = results[0]["experts"]
    loads, balance, squares = (
        [v for n, v in recorded.items() if n.startswith(f"moe/{name}/")]
        for name in ("load", "balance_loss", "z_loss")
    )
    assert loads == want["loads"]
    losses = [LOSSES[0] * a + LOSSES[1] * z for a, z in zip(balance, squares, strict=True)]
    assert losses == pytest.approx(want["router_losses"], rel=1e-12)
    plain = wanted(family, "plain", "eager", ())["gradients"]
    routers = [n for n in plain if n.endswith((".gate.weight", ".router.weight"))]
    assert all(numpy.abs(plain[n] - want["gradients"][n]).max() > 1e-6 for n in routers)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", ALL)
def test_every_family_on_every_mesh(
    pool: RankPool, family: str, mesh: tuple[int, int], schedule: str
) -> None:
    check(pool, family, mesh, schedule)


@pytest.mark.parametrize(
    ("family", "mesh", "side"),
    some_cases(
        [
            ("bert:sequence-classification", (2, 2), "padded"),
            # The last stage reads the token ids, to find the last token before the padding.
            ("llama-tied:sequence-classification", (2, 2), "plain"),
            ("gpt2:token-classification", (2, 1), "padded"),
            ("roberta:token-classification", (1, 2), "plain"),
            *(
                pytest.param(family, mesh, side, marks=pytest.mark.sweep)
                for family in CLASSIFIERS
                for mesh in MESHES
                for side in ("plain", "padded")
            ),
        ],
        0,
    ),
    ids=str,
)
def test_classifiers_of_sequences_and_tokens_have_the_gradients_of_transformers(
    pool: RankPool, family: str, mesh: tuple[int, int], side: str
) -> None:
    check(pool, family, mesh, MESHES[mesh], side)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        # Without those that are refused, and the image, whose 17 positions do not divide.
        *(
            pytest.param(family, marks=pytest.mark.sweep)
            for family in ALL
            if family not in ("mixtral", "falcon-7b", "opt", "granitemoe", "phimoe", "vit")
        ),
    ],
)
def test_sequence_parallelism_changes_no_gradient(pool: RankPool, family: str) -> None:
    side = "long decoder" if tiny_models.CONFIGS[family]().is_encoder_decoder else "plain"
    check(pool, family, (1, 2), "1f1b", side, sequence_parallel=True)


@pytest.mark.parametrize(
    ("family", "side"),
    [
        ("qwen3", "packed"),
        *(pytest.param(f, "padded", marks=pytest.mark.sweep) for f in ALL if f != "vit"),
        *(pytest.param(f, "packed", marks=pytest.mark.sweep) for f in tiny_models.PACKED),
    ],
)
def test_masks_and_positions_reach_all_stages(pool: RankPool, family: str, side: str) -> None:
    check(pool, family, (2, 1), "1f1b", side, "sdpa")


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.sweep) for f in ("qwen3", "gpt-oss"))]
)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_key_heads_fewer_than_tensor_ranks_are_computed_on_several(
    pool: RankPool, family: str, sequence_parallel: bool
) -> None:
    changes = {"num_key_value_heads": 1}
    check(pool, family, (1, 2), "1f1b", changes=changes, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("t5", {"pipeline": {"schedule": "1f1b", "activation_checkpoint_interval": 1}}),
        pytest.param(
            "mixtral",
            {"pipeline": {"schedule": "zb-v", "activation_checkpoint_interval": 2}},
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "llama-tied",
            {
                "mesh": {"pipeline": 2, "tensor": 1, "data": 2, "device": "cpu"},
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500},
            },
        ),
    ],
)
def test_recomputation_and_zero_change_no_gradient(
    pool: RankPool, family: str, keys: dict[str, Any]
) -> None:
    data = keys.get("mesh", {}).get("data", 1)
    mesh = (2, data)  # four ranks with data ranks, two without
    check(pool, family, mesh if data > 1 else (2, 1), "1f1b", keys=keys)
