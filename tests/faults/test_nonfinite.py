"""A gradient that is not finite, wherever it comes from."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipemega.engine import Engine
from pipemega.errors import NonFiniteError
from tests.faults.plant import poison
from tests.faults.table import Ledger
from tests.ranks import checkpoint_run
from tests.ranks.pool import RankPool
from tests.ranks.training_run import settings

STEPS, BAD, MICROBATCHES = 5, 2, 4
BF16 = {"enabled": True}
Place = tuple[int, int]  # stage, micro-batch
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}


def config_of(schedule: str, **changes: Any) -> dict[str, Any]:
    return settings(
        **{
            "train_batch_size": 8,
            "mesh": {"pipeline": 2},
            "pipeline": {"schedule": schedule},
            **changes,
        }
    )


def stage_of(engine: Engine, stage: int) -> nn.Module | None:
    stages: Any = engine._model.stages
    return stages.get(stage)


def poisoned(config: dict[str, Any], place: Place, value: float) -> Engine:
    """An engine in which the gradient at a (stage, micro-batch) of one step is `value`."""
    engine, (stage, microbatch) = checkpoint_run.build(config, "float32"), place
    module = stage_of(engine, stage)
    if module is not None:
        layer = last_layer(module)
        poison(layer, microbatch, MICROBATCHES, value, lambda: engine.global_steps == BAD)
    return engine


def trained(config: dict[str, Any], places: list[Place], value: float) -> list[dict[str, Any]]:
    """For each place: what is seen of a run with `value` there, in one step."""
    return [run(poisoned(config, place, value), STEPS) for place in places]


def stopped(config: dict[str, Any], places: list[Place], value: float) -> list[str]:
    """For each place: the error, after which all is as it was before the step."""
    said = []
    for place in places:
        engine = poisoned(config, place, value)
        for _ in range(BAD):
            engine.train_batch()
        before = parameters_of(engine)
        try:
            engine.train_batch()
        except NonFiniteError as error:
            said.append(str(error))
        assert parameters_of(engine) == before
        assert engine.global_steps == BAD
    return said


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
    if config.get("fp16"):
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
    counters = (engine.global_steps, engine.consumed_samples, engine.skipped_steps)
    return {"losses": losses, "scales": scales, "end": (parameters_of(engine), counters)}


def parameters_of(engine: Engine) -> dict[str, bytes]:
    return {
        name: value.view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in engine.parameter_state().items()
    }


SCHEDULES = [
    ("1f1b", 2, {}),
    pytest.param("gpipe", 2, {}, marks=pytest.mark.sweep),
    pytest.param("zb-v", 4, {}, marks=pytest.mark.sweep),
    pytest.param("interleaved", 4, {}, marks=pytest.mark.sweep),
    pytest.param("1f1b", 2, {"zero_optimization": {"stage": 1}}, marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("schedule", "stages", "changes"), SCHEDULES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_gradient_that_is_not_finite_costs_that_step_wherever_it_comes_from(
    pool: RankPool,
    ledger: Ledger,
    precision: str,
    schedule: str,
    stages: int,
    changes: dict[str, Any],
) -> None:
    """All ranks skip it; inf in fp16 halves the scale; the rest is the run without that step."""
    changes = {**changes, "fp16": FP16} if precision == "fp16" else {**changes, "bf16": BF16}
    config = config_of(schedule, **changes)
    value = math.inf if precision == "fp16" else math.nan
    places = [(stage, m) for stage in range(stages) for m in range(MICROBATCHES)]
    seen = pool.run(2, trained, config, places, value)
    wanted = pool.run(2, without_the_step, config)

    def check(place: Place) -> None:
        for rank, want in zip(seen, wanted, strict=True):
            one = rank[places.index(place)]
            if precision == "fp16":
                assert one["scales"] == [256.0] * BAD + [128.0] * (STEPS - BAD)
            assert one["end"][1][2] == 1, "one step was skipped"
            assert one["losses"][BAD + 1 :] == want["losses"]
            assert one["end"] == want["end"]

    ledger.each(
        f"{value} at a (stage, micro-batch) in {precision}: the step is skipped", places, check
    )


@pytest.mark.parametrize(("schedule", "stages", "changes"), SCHEDULES)
def test_a_run_that_shall_stop_at_nan_names_its_stage_and_micro_batch(
    pool: RankPool, ledger: Ledger, schedule: str, stages: int, changes: dict[str, Any]
) -> None:
    training = {"on_nonfinite": {"policy": "stop"}}
    config = config_of(schedule, bf16=BF16, training=training, **changes)
    places = [(stage, m) for stage in range(stages) for m in range(MICROBATCHES)]
    said = pool.run(2, stopped, config, places, math.nan)

    def check(place: Place) -> None:
        stage, microbatch = place
        for rank in said:
            text = rank[places.index(place)]
            assert f"in the backward of micro-batch {microbatch}" in text, text
            assert f"stage {stage}" in text, text

    ledger.each("nan at a (stage, micro-batch), policy 'stop': it is named", places, check)
