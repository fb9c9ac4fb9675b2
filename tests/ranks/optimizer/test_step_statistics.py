"""`monitor.log_params_norm` and `log_num_zeros_in_grad` on every kind of mesh."""

import math
from typing import Any

import numpy
import pytest

from tests.ranks import training_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some_cases

LOGGED = {"log_params_norm": True, "log_num_zeros_in_grad": True}
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1500, "overlap_comm": True}}
POST = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}
LORA = {"lora": {"r": 2}}


def config(mesh: tuple[int, int, int], schedule: str, **changes: Any) -> dict[str, Any]:
    data, tensor, pipeline = mesh
    sizes = {"data": data, "tensor": tensor, "pipeline": pipeline}
    section = {"schedule": schedule} | changes.pop("pipeline", {})
    found = settings(mesh=sizes, pipeline=section, monitor=LOGGED, **changes)
    # A vocabulary of 50, padded to 56 rows on one rank and to 64 on two; positions without tokens.
    found["model"] |= {"num_layers": 2, "max_position_embeddings": 13}
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    some_cases([
        (1, [((1, 1, 1), "1f1b", {}), ((1, 1, 1), "zb-h1", LORA)]),
        (2, [((1, 1, 2), "zb-v", {}), ((1, 1, 2), "zb-h1", {"pipeline": POST}),
             ((2, 1, 1), "1f1b", ZERO), ((1, 2, 1), "1f1b", LORA)]),
        (4, [((2, 2, 1), "1f1b", ZERO), ((2, 1, 2), "zb-h1", ZERO), ((1, 2, 2), "1f1b", {})]),
    ], 1),
)  # fmt: skip
def test_every_element_of_a_logical_parameter_is_counted_once(
    pool: RankPool, ranks: int, cases: list[tuple[Any, str, dict[str, Any]]]
) -> None:
    """The norm of the whole parameters, and the zeros of the whole gradients, without padding."""
    configs = [(config(mesh, schedule, **changes), "float64") for mesh, schedule, changes in cases]
    by_rank = pool.run(ranks, training_runs.train_all, configs)
    for (_, _, changes), *results in zip(cases, *by_rank, strict=True):
        for found in results:
            squares = sum(float((p**2).sum()) for p in results[0]["parameters"].values())
            assert found["params_norm"][-1] == pytest.approx(math.sqrt(squares), rel=1e-12)
            zeros = [
                sum(int(numpy.sum(gradient == 0)) for gradient in gradients.values())
                for gradients in results[0]["gradients"]
            ]
            assert found["num_zeros"] == zeros
            # The positions without tokens; with LoRA the first factor, as the second begins at 0.
            assert zeros[0] >= (80 if "lora" not in changes else 1)


def test_the_numbers_of_a_skipped_step_are_those_of_its_gradients(pool: RankPool) -> None:
    """The parameters do not change; nan is no zero."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    (found,) = pool.run(1, training_runs.train, config((1, 1, 1), "1f1b", **fp16), "float32")
    assert found["skipped"] == [True] * 3
    assert len(set(found["params_norm"])) == 1
    assert all(isinstance(count, int) for count in found["num_zeros"])


def test_without_the_keys_nothing_is_computed(pool: RankPool) -> None:
    (found,) = pool.run(1, training_runs.train, settings(), "float64", 1)
    assert (found["params_norm"], found["num_zeros"]) == ([None], [None])
