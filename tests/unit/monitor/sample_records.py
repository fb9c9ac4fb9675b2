"""Records for the tests of the monitor."""

from pathlib import Path
from typing import Any

from pipemega.monitor import EpochRecord, EvalRecord, PictureRecord, StepRecord, TimelineRecord


def step_record(step: int = 1, **changes: Any) -> StepRecord:
    """The record of step `step` in a run with 32 samples per step."""
    fields: dict[str, Any] = {
        "step": step,
        "consumed_samples": 32 * step,
        "consumed_tokens": 4096 * step,
        "loss": 6.5 / step,
        "lr": 3e-4,
        "grad_norm": 1.25,
        "step_seconds": 0.5,
        "samples_per_second": 64.0,
        "tokens_per_second": 8192.4,
    }
    return StepRecord(**(fields | changes))


def epoch_record(**changes: Any) -> EpochRecord:
    """The second epoch of 10 steps of a run without tokens."""
    fields: dict[str, Any] = {
        "step": 20,
        "consumed_samples": 635,
        "epoch": 2,
        "steps": 10,
        "samples": 315,
        "loss": 0.5,
        "seconds": 2.0,
    }
    return EpochRecord(**(fields | changes))


def eval_record(**changes: Any) -> EvalRecord:
    """An evaluation of tokens."""
    fields: dict[str, Any] = {
        "step": 20,
        "consumed_samples": 640,
        "loss": 4.0,
        "seconds": 1.5,
        "has_tokens": True,
    }
    return EvalRecord(**(fields | changes))


def timeline_record(**changes: Any) -> TimelineRecord:
    """The timeline of a step on two ranks."""
    fields: dict[str, Any] = {
        "step": 10,
        "consumed_samples": 320,
        "schedule": "zb-v",
        "makespan": 0.25,
        "span": 0.24,
        "bubble": 0.125,
        "predicted_makespan": 0.2,
        "busy": (0.2, 0.15),
        "waited": (0.01, 0.02),
    }
    return TimelineRecord(**(fields | changes))


def picture_record(picture: Path) -> PictureRecord:
    """The picture of the loads of experts."""
    return PictureRecord(step=20, consumed_samples=640, picture_name="moe/loads", picture=picture)
