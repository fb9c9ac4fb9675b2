"""Generated tokens do not depend on the mesh."""

import pytest

from tests.ranks import generation_runs
from tests.ranks.pool import RankPool


@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        ("llama", {"pipeline": 2, "tensor": 2}),
        pytest.param("gpt2", {"pipeline": 2, "data": 2}, marks=pytest.mark.sweep),
        pytest.param("gpt2", {"tensor": 2, "sequence_parallel": True}, marks=pytest.mark.sweep),
        pytest.param("megatron", {"tensor": 2, "pipeline": 2}, marks=pytest.mark.sweep),
        pytest.param("llama", {"pipeline": 4}, marks=pytest.mark.sweep),
    ],
)
def test_every_mesh_generates_the_tokens_of_one_process(pool: RankPool, style, mesh):
    cached, whole = generation_runs.tokens(style, 1.0)
    assert cached == whole
    ranks = mesh.get("pipeline", 1) * mesh.get("tensor", 1) * mesh.get("data", 1)
    found = pool.run(ranks, generation_runs.tokens, style, 1.0, mesh)
    assert found == [[whole, whole]] * ranks
