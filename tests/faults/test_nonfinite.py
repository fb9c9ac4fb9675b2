"""A gradient that is not finite, wherever it comes from."""

from typing import Any

import pytest
import torch
from torch import nn

from pipemega.engine import Engine
from tests.faults.plant import poison
from tests.faults.table import Ledger
from tests.ranks import checkpoint_run
from tests.ranks.pool import RankPool
from tests.ranks.training_run import settings

STEPS, BAD = 5, 2
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}


def config_of(schedule: str, **changes: Any) -> dict[str, Any]:
    return settings(
        train_batch_size=8,
        mesh={"pipeline": 2},
        pipeline={"schedule": schedule},
        fp16=FP16,
        **changes,
    )


def stage_of(engine: Engine, stage: int) -> nn.Module | None:
    stages: Any = engine._model.stages
    return stages.get(stage)


def with_inf(config: dict[str, Any], places: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """For each (stage, micro-batch): what is seen of a run with inf there, in one step."""
    seen = []
    for stage, microbatch in places:
        engine = checkpoint_run.build(config, "float32")
        module = stage_of(engine, stage)
        if module is not None:
            layer = last_layer(module)
            poison(layer, microbatch, float("inf"), lambda e=engine: e.global_steps == BAD)
        seen.append(run(engine, STEPS))
    return seen


def last_layer(stage: nn.Module) -> nn.Module:
    layers = [m for name, m in stage.named_modules() if name.split(".")[-2:-1] == ["layers"]]
    assert layers, [name for name, _ in stage.named_modules()]
    return layers[-1]


def without_the_step(config: dict[str, Any]) -> dict[str, Any]:
    """The same run, from which the step was taken out by hand."""
    engine = checkpoint_run.build(config, "float32")
    run(engine, BAD)
    assert engine.loader is not None
    engine.loader.next_step()
    step = engine._step
    assert step is not None
    step.loss_scale.update(True)
    step.steps += 1
    step.skipped_steps += 1
    engine.global_steps += 1
    engine.consumed_samples += engine.batch.train_batch_size
    return run(engine, STEPS - BAD - 1)


def run(engine: Engine, steps: int) -> dict[str, Any]:
    losses, scales = [], []
    for _ in range(steps):
        losses.append(engine.train_batch().hex())
        scales.append(engine._step.loss_scale.scale if engine._step else 0.0)
    parameters = {
        name: value.view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in engine.parameter_state().items()
    }
    counters = (engine.global_steps, engine.consumed_samples, engine.skipped_steps)
    return {"losses": losses, "scales": scales, "end": (parameters, counters)}


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", 2),
        pytest.param("gpipe", 2, marks=pytest.mark.sweep),
        pytest.param("zb-v", 4, marks=pytest.mark.sweep),
        pytest.param("interleaved", 4, marks=pytest.mark.sweep),
    ],
)
def test_inf_in_fp16_costs_one_step_and_half_the_scale_wherever_it_comes_from(
    pool: RankPool, ledger: Ledger, schedule: str, stages: int
) -> None:
    config = config_of(schedule)
    places = [(stage, microbatch) for stage in range(stages) for microbatch in range(4)]
    seen = pool.run(2, with_inf, config, places)
    wanted = pool.run(2, without_the_step, config)

    def check(place: tuple[int, int]) -> None:
        at = places.index(place)
        for rank, want in zip(seen, wanted, strict=True):
            one = rank[at]
            assert one["scales"] == [256.0] * BAD + [128.0] * (STEPS - BAD)
            assert one["end"][1][2] == 1, "one step was skipped"
            assert one["losses"][BAD + 1 :] == want["losses"]
            assert one["end"] == want["end"]

    ledger.each("inf at a (stage, micro-batch) in fp16: that step is skipped", places, check)
