"""Optimizers and schedulers of the user on meshes, against one process: fp64 to 1e-10."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.optional_packages import HAS_MUON
from tests.ranks.optimizer import user_optimizer_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some_cases

# (ranks, changes of the config).
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data 2, ZeRO": (2, {"zero_optimization": {"stage": 1}}),
    "tensor 2": (2, {"mesh": {"tensor": 2}}),
    "pipeline 2": (
        2,
        {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "zb-h2", "optimizer_sync":
         "post_validate", "optimizer_sync_after": 0}},
    ),
    "pipeline 2, data 2, ZeRO": (
        4,
        {"mesh": {"pipeline": 2}, "zero_optimization": {"stage": 1, "overlap_comm": True}},
    ),
    "tensor 2, pipeline 2": (4, {"mesh": {"tensor": 2, "pipeline": 2}}),
}  # fmt: skip
# Each mesh continues the run that another one has saved.
ROUTE = ["alone", "data 2, ZeRO", "pipeline 2", "pipeline 2, data 2, ZeRO", "tensor 2",
         "tensor 2, pipeline 2"]  # fmt: skip


def case_of(mesh: str, optimizer: str, **more: Any) -> dict[str, Any]:
    # Clipping: with post-validation each step is undone.
    config = settings(gradient_clipping=0.05, train_batch_size=8, **MESHES[mesh][1])
    del config["optimizer"], config["scheduler"]
    return {"config": config | more.pop("config", {}), "optimizer": optimizer, **more}


def wrong(seen: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    found = []
    for key in ("loss", "rates"):
        for step, value in seen[key].items():
            if not numpy.allclose(value, expected[key][step], rtol=1e-10, atol=0):
                found.append(f"{key} of step {step} is {value}, not {expected[key][step]}")
    for name, value in seen["parameters"].items():
        error = abs(value - expected["parameters"][name]).max()
        if not error <= 1e-10:
            found.append(f"{name} is {error:.1e} off")
    return found


@pytest.mark.parametrize(
    ("optimizer", "route", "more"),
    some_cases(
        [
            ("SmoothLion", ROUTE, {"schedule": "cosine", "groups": user_optimizer_runs.GROUPS}),
            (
                "Corrected",
                ["alone", "pipeline 2, data 2, ZeRO", "tensor 2"],
                {"schedule": "lambda"},
            ),
        ],
        1,
    ),
)
def test_runs_saved_on_one_mesh_and_resumed_on_another_equal_one_process(
    pool: RankPool, tmp_path: Path, optimizer: str, route: list[str], more: dict[str, Any]
) -> None:
    def cases(ranks: int, sources: dict[str, str] | None) -> list[dict[str, Any]]:
        found = []
        for mesh in route:
            if MESHES[mesh][0] != ranks:
                continue
            case = case_of(mesh, optimizer, **more)
            if sources is None:
                case["folder"] = str(tmp_path / mesh)
            else:
                case["source"] = str(tmp_path / sources[mesh])
            found.append(case)
        return found

    expected: dict[str, Any] = {}
    previous = dict(zip(route, [route[-1], *route[:-1]], strict=True))
    for sources in (None, previous):
        for ranks in (1, 2, 4):
            for of_rank in pool.run(ranks, user_optimizer_runs.train_all, cases(ranks, sources)):
                for seen in of_rank:
                    expected = expected or seen
                    assert wrong(seen, expected) == []


def test_masters_in_bf16_are_those_of_one_data_rank_with_zero(pool: RankPool) -> None:
    """Slices of fp32 masters: bitwise, since the sum of two gradients has no order."""
    bf16 = {"bf16": {"enabled": True}}
    cases = [
        case_of("alone", "Lion", schedule="cosine", config=bf16 | {"zero_optimization": zero})
        for zero in ({"stage": 0}, {"stage": 1, "offload_optimizer": {"device": "cpu"}})
    ]
    for plain, zero in pool.run(2, user_optimizer_runs.train_all, cases):
        assert zero["loss"] == plain["loss"]
        for name, value in plain["parameters"].items():
            assert numpy.array_equal(zero["parameters"][name], value), name


def test_wrong_optimizers_are_refused_with_one_error_on_every_rank(pool: RankPool) -> None:
    untested = {"zero_allow_untested_optimizer": True}
    cases = {
        "the optimizer does not work on parts of the parameters: in a test its updates of cut "
        "parameters differ from those of whole ones by": case_of("pipeline 2", "GlobalNorm"),
        "the optimizer fails with small parameters of as many dims as those of the model have: "
        "optimizer raised ValueError: Muon only": case_of("data 2, ZeRO", "Muon"),
        "the optimizer Lion drops": case_of("pipeline 2", "drop_all", config=untested),
        "the optimizer Lion drops 1 of the": case_of(
            "pipeline 2", "drop_on_rank_1", config=untested
        ),
        "the optimizer has 2 parameter groups on rank 0 and 1 on rank 1: keep groups without": (
            case_of("pipeline 2", "skip_empty_groups",
                    groups=[{"params": r"layers\.2\.", "lr": 0.1}], config=untested)
        ),
        "model_parameters[0].params 'nrom' matches none of the": (
            case_of("pipeline 2", "Lion", groups=[{"params": "nrom"}])
        ),
        "lr_scheduler returns a StepLR over another optimizer": (
            case_of("pipeline 2", "Lion", schedule="other optimizer")
        ),
        "the optimizer fails with small parameters of as many dims as those of the model have: the "
        "optimizer Lion drops 1 of the": (
            case_of("pipeline 2", "drop_on_rank_1")
        ),
        "": case_of("pipeline 2", "GlobalNorm", config=untested),
    }  # fmt: skip
    if not HAS_MUON:
        cases = {text: case for text, case in cases.items() if "Muon" not in text}
    first, second = pool.run(2, user_optimizer_runs.errors_of, list(cases.values()))
    assert first == second
    for text, error in zip(cases, first, strict=True):
        assert error.startswith(text), error
    assert first[-1] == ""
