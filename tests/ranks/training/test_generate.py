"""Generated tokens do not depend on the mesh."""

import pytest

from tests.ranks import generation_runs
from tests.ranks.pool import RankPool


@pytest.mark.parametrize(
    ("style", "mesh", "vocabulary"),
    [
        ("llama", {"pipeline": 2, "tensor": 2}, "stage"),
        ("gpt2", {"pipeline": 2}, "parallel"),
        ("experts", {"data": 2, "expert": 2}, "stage"),
        pytest.param(
            "experts", {"pipeline": 2, "data": 2, "expert": 2}, "stage", marks=pytest.mark.sweep
        ),
        pytest.param("llama", {"pipeline": 2, "tensor": 2}, "parallel", marks=pytest.mark.sweep),
        pytest.param("gpt2", {"pipeline": 2, "data": 2}, "stage", marks=pytest.mark.sweep),
        pytest.param(
            "gpt2", {"tensor": 2, "sequence_parallel": True}, "stage", marks=pytest.mark.sweep
        ),
        pytest.param("megatron", {"tensor": 2, "pipeline": 2}, "stage", marks=pytest.mark.sweep),
        pytest.param("llama", {"pipeline": 4}, "stage", marks=pytest.mark.sweep),
    ],
)
def test_every_mesh_generates_the_tokens_of_one_process(
    pool: RankPool, style: str, mesh: dict[str, int], vocabulary: str
) -> None:
    cached, whole = generation_runs.tokens(style, 1.0)
    assert cached == whole
    ranks = mesh.get("pipeline", 1) * mesh.get("tensor", 1) * mesh.get("data", 1)
    found = pool.run(ranks, generation_runs.tokens, style, 1.0, mesh, vocabulary)
    assert found == [[whole, whole]] * ranks
