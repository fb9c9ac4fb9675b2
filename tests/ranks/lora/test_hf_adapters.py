"""LoRA on models of transformers: every mesh trains like one process."""

from typing import Any

import numpy
import pytest

from tests.ranks.lora import hf_runs
from tests.ranks.pool import RankPool
from tests.sampling import some

pytest.importorskip("transformers", reason="transformers is not installed")

LORA = {"r": 3, "alpha": 6.0, "dropout": 0.1}
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 300}}


def case(
    data: int,
    tensor: int,
    pipeline: int,
    schedule: str,
    family: str = "qwen3",
    expert: int = 1,
    **config: Any,
) -> tuple[str, dict[str, Any]]:
    mesh = {"data": data, "tensor": tensor, "pipeline": pipeline, "expert": expert}
    section = {"schedule": schedule}
    return family, {"mesh": mesh, "pipeline": section, "lora": LORA, **config}


CASES = {
    "tensor 2, pipeline 2": [case(1, 2, 2, "1f1b"), case(1, 2, 2, "zb-v")],
    "fewer key heads than tensor ranks": [case(1, 4, 1, "1f1b"), case(1, 4, 1, "zb-h1")],
    "sequence parallel": [case(1, 2, 2, "zb-h1", sequence_parallel=True)],
    "sequence parallel, fewer key heads": [case(1, 4, 1, "1f1b", sequence_parallel=True)],
    "Conv1D": [case(1, 2, 2, "zb-h1", "gpt2")],
    "data 2, pipeline 2, ZeRO": [case(2, 1, 2, "zb-h1", **ZERO)],
    "experts": [case(2, 1, 2, "zb-h1", "qwen3_moe", expert=2)],
    "experts, tensor 2": [case(2, 2, 1, "1f1b", "qwen3_moe", expert=2)],
}


@pytest.mark.parametrize("name", some(CASES, 0))
def test_every_mesh_trains_the_adapters_like_one_process(pool: RankPool, name: str) -> None:
    results = pool.run(4, hf_runs.train_all, CASES[name])[0]
    family = CASES[name][0][0]
    (wanted,) = pool.run(1, hf_runs.train_all, [case(1, 1, 1, "1f1b", family)])[0]
    for result in results:
        for got, want in zip(result["steps"], wanted["steps"], strict=True):
            assert got == pytest.approx(want, rel=1e-10)
        assert set(result["parameters"]) == set(wanted["parameters"])
        for parameter, value in wanted["parameters"].items():
            difference = numpy.abs(result["parameters"][parameter] - value).max()
            assert difference < 1e-12, parameter
    for result in results[1:]:
        for parameter, value in results[0]["parameters"].items():
            assert numpy.array_equal(result["parameters"][parameter], value), parameter
