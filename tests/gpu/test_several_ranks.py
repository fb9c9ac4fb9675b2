"""Data, tensor and pipeline ranks over NCCL, compared with one rank on the CPU.

Also tied parameters, ZeRO, saves in the background, post-validation, evaluation and generation.
"""

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.gpu import rank_functions
from tests.gpu.devices import Run, on_meshes, ranks_of

# Relative, of losses in fp32 after a few steps.
TOLERANCE = {"cuda": 5e-4, "cpu": 1e-5}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
OVERLAP = {"stage": 1, "reduce_bucket_size": 500, "overlap_comm": True}

expected_of_one_rank: dict[str, Any] = {}


def one_rank(name: str, **arguments: Any) -> Any:
    """Return the result of a function on one CPU rank, computed once."""
    key = f"{name} {arguments}"
    if key not in expected_of_one_rank:
        expected_of_one_rank[key] = getattr(rank_functions, name)("cpu", {}, **arguments)
    return expected_of_one_rank[key]


def assert_close(results: list[Any], expected: Any, device: str) -> None:
    for rank, result in enumerate(results):
        for key, value in expected.items():
            assert result[key] == pytest.approx(value, rel=TOLERANCE[device]), (rank, key)


@on_meshes(
    {"pipeline": 2}, {"data": 2}, {"tensor": 2}, SEQUENCE,
    {"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, **SEQUENCE},
    {"data": 2, **SEQUENCE}, {"tensor": 4, "sequence_parallel": True},
    {"pipeline": 2, "data": 2, **SEQUENCE}, {"pipeline": 4, "tensor": 2}, {"data": 4, "tensor": 2},
)  # fmt: skip
def test_a_gpt_on_any_mesh_has_the_losses_of_one_rank(
    run: Run, device: str, mesh: dict[str, Any]
) -> None:
    """Embedding and head are tied: on a pipeline their gradients go from the first to the last."""
    results = run(device, ranks_of(mesh), rank_functions.train_gpt, mesh=mesh)
    assert_close(results, one_rank("train_gpt"), device)


@pytest.mark.parametrize("shapes", ["exchanged", "declared"])
@on_meshes({"pipeline": 2})
def test_a_gpt_with_other_headers_has_the_losses_of_one_rank(
    run: Run, device: str, mesh: dict[str, Any], shapes: str
) -> None:
    section = {"schedule": "1f1b", "shapes": shapes}
    results = run(device, 2, rank_functions.train_gpt, mesh=mesh, pipeline=section)
    assert_close(results, one_rank("train_gpt"), device)


@on_meshes({"pipeline": 2}, {"pipeline": 3}, {"pipeline": 4}, {"pipeline": 4, "data": 2})
def test_a_matrix_on_three_stages_is_trained_as_on_one_rank(
    run: Run, device: str, mesh: dict[str, Any]
) -> None:
    """Not every rank has a copy: the others take no part in the exchange."""
    results = run(device, ranks_of(mesh), rank_functions.train_tied, mesh=mesh)
    expected = one_rank("train_tied")
    for result in results:
        # The data ranks of this test read the same micro-batches.
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert set(result["parameters"]) == set(expected["parameters"])
        for name, value in expected["parameters"].items():
            numpy.testing.assert_allclose(result["parameters"][name], value, atol=1e-10)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@on_meshes({"data": 2}, {"pipeline": 2, "data": 2}, {"data": 4}, {"data": 4, "tensor": 2})
def test_zero_has_the_losses_of_one_rank(
    run: Run, device: str, mesh: dict[str, Any], overlap: bool
) -> None:
    schedule = {"pipeline": {"schedule": "zb-h1"}} if "pipeline" in mesh else {}
    zero = {**OVERLAP, "overlap_comm": overlap}
    results = run(
        device,
        ranks_of(mesh),
        rank_functions.train_gpt,
        mesh=mesh,
        zero_optimization=zero,
        **schedule,
    )
    assert_close(results, one_rank("train_gpt"), device)


@pytest.mark.parametrize("in_background", [False, True], ids=["", "in background"])
@on_meshes({"pipeline": 2}, {"data": 2}, {"pipeline": 2, **SEQUENCE}, {"pipeline": 2, "data": 4})
def test_a_run_that_is_saved_while_it_trains_resumes_with_the_same_losses(
    run: Run, device: str, mesh: dict[str, Any], in_background: bool, tmp_path: Path
) -> None:
    results = run(
        device,
        ranks_of(mesh),
        rank_functions.save_and_resume,
        mesh=mesh,
        folder=str(tmp_path / "run"),
        in_background=in_background,
    )
    for kept, resumed in results:
        # Embeddings on a GPU add gradients in no fixed order.
        assert resumed == pytest.approx(kept, rel=1e-5 if device == "cuda" else 0, abs=0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@on_meshes({"pipeline": 2}, {"pipeline": 2, "data": 2}, {"pipeline": 2, **SEQUENCE})
def test_a_post_validated_step_is_undone_and_repeated_on_a_pipeline(
    run: Run, device: str, mesh: dict[str, Any], schedule: str
) -> None:
    # The model has layers for two ranks of two stages.
    results = run(
        device,
        ranks_of(mesh),
        rank_functions.validate_afterwards,
        mesh=mesh,
        schedule=schedule,
    )
    for result in results:
        assert result["validated"] == pytest.approx(result["fenced"], rel=TOLERANCE[device])
        assert result["rollbacks"] > 0
        assert not all(result["waited"]), "no step was left unvalidated"
        assert result["difference"] <= (1e-4 if device == "cuda" else 0.0)


@on_meshes(
    {"pipeline": 2},
    {"pipeline": 1},
    {"tensor": 2},
    {"pipeline": 2, **SEQUENCE},
    {"pipeline": 4},
    {"pipeline": 2, "data": 2, **SEQUENCE},
    cheap=1,
)
def test_evaluation_and_generation_between_steps_are_those_of_one_rank(
    run: Run, device: str, mesh: dict[str, Any]
) -> None:
    results = run(device, ranks_of(mesh), rank_functions.evaluate_and_generate, mesh=mesh)
    expected = one_rank("evaluate_and_generate")
    for result in results:
        assert result["tokens"] == expected["tokens"]
    assert_close(results, {key: expected[key] for key in ("loss", "eval")}, device)
