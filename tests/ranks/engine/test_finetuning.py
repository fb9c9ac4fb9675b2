"""Fine-tuning data on any mesh: the same steps, and packed samples equal padded ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.engine import finetuning_runs
from tests.ranks.engine.test_training_data import ranks_of
from tests.ranks.pool import RankPool
from tests.sampling import some_cases

PADDED = {"data": {"packing": False}}
ROUNDED = {"data": {"packing": False, "pad_to_multiple_of": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetuning_runs.write_records(tmp_path_factory.mktemp("finetuning"))


def assert_same(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-10)
    assert result[1] == pytest.approx(expected[1], rel=1e-10)
    for name, value in expected[2].items():
        np.testing.assert_allclose(result[2][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    some_cases(
        [
            ({"pipeline": 2, "tensor": 2}, {"mesh": {"sequence_parallel": True}}),
            ({"pipeline": 2, "data": 2}, {"pipeline": {"schedule": "zb-v"}}),
            ({"pipeline": 2}, {"pipeline": {"shapes": "declared"}}),
            ({"pipeline": 2}, PADDED),
            ({"pipeline": 2}, {**ROUNDED, "pipeline": {"shapes": "exchanged"}}),
            ({"data": 2}, ROUNDED),
        ],
        0,
        1,
        3,
    ),
    ids=str,
)
def test_a_mesh_trains_on_the_samples_of_one_process(
    pool: RankPool, folder: Path, mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    plain = {key: value for key, value in changes.items() if key == "data"}
    expected = pool.run(1, finetuning_runs.train, folder, plain)[0]
    on_mesh = {**changes, "mesh": {**mesh, **changes.get("mesh", {})}}
    for result in pool.run(ranks_of(mesh), finetuning_runs.train, folder, on_mesh):
        assert_same(result, expected)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_validation_samples_have_the_loss_of_padded_ones(
    pool: RankPool, folder: Path, positions: str
) -> None:
    model = {"model": {"position_embedding_type": positions}}
    losses = [
        pool.run(1, finetuning_runs.train, folder, {**model, **data}, 0)[0][1]
        for data in ({}, PADDED, ROUNDED)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-12)


def test_a_hugging_face_model_has_the_loss_of_padded_samples_on_packed_ones(
    pool: RankPool, folder: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    path = folder / "llama"
    transformers.LlamaConfig(
        **sizes,
        vocab_size=280,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    model = {"type": "hf", "path": str(path), "pretrained": False, "seq_length": 24}
    changes = {"model": model, "mesh": {"pipeline": 2, "tensor": 2}}
    packed = pool.run(4, finetuning_runs.train, folder, changes, 0)[0]
    padded = pool.run(1, finetuning_runs.train, folder, {"model": model, **PADDED}, 0)[0]
    assert packed[1] == pytest.approx(padded[1], rel=1e-10)
    # A step on packed samples is that of one process.
    expected = pool.run(1, finetuning_runs.train, folder, {"model": model}, 2)[0]
    for result in pool.run(4, finetuning_runs.train, folder, changes, 2):
        assert_same(result, expected)


def test_a_resumed_run_on_packed_samples_is_equal_bit_for_bit(
    pool: RankPool, tmp_path: Path
) -> None:
    folder, changes = finetuning_runs.write_records(tmp_path), {"mesh": {"pipeline": 2}}
    whole = pool.run(2, finetuning_runs.train, folder, changes, 6)
    pool.run(2, finetuning_runs.train, folder, changes, 6, 3)
    resumed = pool.run(2, finetuning_runs.train, folder, changes, 6)
    for result, expected in zip(resumed, whole, strict=True):
        assert result[0] == expected[0][3:]
        assert result[1] == expected[1]
        for name, value in expected[2].items():
            assert np.array_equal(result[2][name], value), name
