"""A non-finite gradient in any stage and micro-batch."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipemega.engine.engine import Engine
from pipemega.errors import NonFiniteError
from pipemega.tensor_parallel import VocabParallelHead
from tests.faults.fault_injection import fill_gradient
from tests.faults.table import ResultTable
from tests.ranks.checkpoint import checkpoint_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some

STEPS, BAD, MICROBATCHES = 5, 2, 4
BF16 = {"enabled": True}
Place = tuple[int, int]  # stage, micro-batch
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}


def config_of(schedule: str, **changes: Any) -> dict[str, Any]:
    return settings(
        **{
            "train_batch_size": 8,
            "mesh": {"pipeline": 2},
            # By time, the last of four stages would have nothing but the head.
            "pipeline": {"schedule": schedule, "partition": "parameters"},
            **changes,
        }
    )


def stage_of(engine: Engine, stage: int) -> nn.Module | None:
    stages: Any = engine.steps.model.stages
    return stages.get(stage)


def engine_with_fault(config: dict[str, Any], place: Place, value: float) -> Engine:
    """Return an engine whose gradient at a (stage, micro-batch) of one step is `value`."""
    engine, (stage, microbatch) = checkpoint_runs.build(config, "float32"), place
    module = stage_of(engine, stage)
    if module is not None:
        layer = last_layer(module)
        fill_gradient(layer, microbatch, MICROBATCHES, value, lambda: engine.global_steps == BAD)
    return engine


def trained(config: dict[str, Any], places: list[Place], value: float) -> list[dict[str, Any]]:
    """For each place, run with `value` there in one step, and return the results."""
    return [run(engine_with_fault(config, place, value), STEPS) for place in places]


def stopped(config: dict[str, Any], places: list[Place], value: float) -> list[str]:
    """For each place, return the error; check that it leaves the parameters unchanged."""
    errors = []
    for place in places:
        engine = engine_with_fault(config, place, value)
        for _ in range(BAD):
            engine.train_batch()
        before = parameters_of(engine)
        try:
            engine.train_batch()
        except NonFiniteError as error:
            errors.append(str(error))
        assert parameters_of(engine) == before
        assert engine.global_steps == BAD
    return errors


def last_layer(stage: nn.Module) -> nn.Module:
    """Return the last layer before the head: a hook on the head would make logits."""
    layers = [m for name, m in stage.named_modules() if name.split(".")[-2:-1] == ["layers"]]
    layers = [layer for layer in layers if not isinstance(layer, VocabParallelHead)]
    assert layers, [name for name, _ in stage.named_modules()]
    return layers[-1]


def without_the_step(config: dict[str, Any]) -> dict[str, Any]:
    """Run without the step, skipping it explicitly."""
    engine = checkpoint_runs.build(config, "float32")
    run(engine, BAD)
    assert engine.loader is not None
    engine.loader.next_step()
    step = engine.steps.optimizer_step
    assert step is not None
    if config.get("fp16"):
        step.loss_scale.update(True)
    step.steps += 1
    step.skipped_steps += 1
    engine.steps.global_steps += 1
    engine.steps.consumed_samples += engine.batch.train_batch_size
    return run(engine, STEPS - BAD - 1)


def run(engine: Engine, steps: int) -> dict[str, Any]:
    losses, scales = [], []
    for _ in range(steps):
        losses.append(engine.train_batch().hex())
        scales.append(
            engine.steps.optimizer_step.loss_scale.scale if engine.steps.optimizer_step else 0.0
        )
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
@pytest.mark.parametrize("precision", some(["fp16", "bf16"], 0))
def test_a_non_finite_gradient_in_any_place_skips_that_step_only(
    pool: RankPool,
    results: ResultTable,
    precision: str,
    schedule: str,
    stages: int,
    changes: dict[str, Any],
) -> None:
    """All ranks skip the step; inf in fp16 halves the scale; the rest equals a run without it."""
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

    results.check_all(
        f"{value} at a (stage, micro-batch) in {precision}: the step is skipped", places, check
    )


@pytest.mark.parametrize(("schedule", "stages", "changes"), SCHEDULES)
def test_with_policy_stop_the_error_names_stage_and_micro_batch(
    pool: RankPool, results: ResultTable, schedule: str, stages: int, changes: dict[str, Any]
) -> None:
    training = {"on_nonfinite": {"policy": "stop"}}
    config = config_of(schedule, bf16=BF16, training=training, **changes)
    places = [(stage, m) for stage in range(stages) for m in range(MICROBATCHES)]
    errors = pool.run(2, stopped, config, places, math.nan)

    def check(place: Place) -> None:
        stage, microbatch = place
        for rank in errors:
            text = rank[places.index(place)]
            assert f"in the backward of micro-batch {microbatch}" in text, text
            assert f"stage {stage}" in text, text

    results.check_all(
        "nan at a (stage, micro-batch), policy 'stop': the error names it", places, check
    )
