"""Learning rate, schedule and weight decay of a resumed run: of its config or of the checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from pipemega.config import load
from pipemega.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.test_load_options import build, optimizer_of, train

COSINE = {"type": "cosine", "params": {"warmup_steps": 2}}
FIRST = {"scheduler": COSINE, "training": {"train_steps": 10}}
# Another peak, another curve, another length.
OTHER = {
    "optimizer": optimizer_of(lr=0.5, weight_decay=0.3),
    "scheduler": {"type": "linear", "params": {"warmup_steps": 1}},
    "training": {"train_steps": 30},
}


def rates(engine: Any, steps: int) -> list[float]:
    found = []
    while engine.global_steps < steps:
        train(engine, 1)
        found.append(engine.last_step.learning_rate)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> str:
    engine = build(**FIRST)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    return str(tmp_path)


def continued(folder: str, changed: dict[str, Any], **keys: bool) -> Any:
    return build(**{**changed, "checkpoint": {"load": folder, **keys}})


@pytest.mark.parametrize("keys", [{}, {"override_opt_param_scheduler": True}])
def test_the_values_of_the_config_apply_from_the_first_resumed_step_on(
    saved: str, keys: dict[str, bool]
) -> None:
    engine = continued(saved, OTHER, **keys)
    fresh = build(**OTHER)
    assert rates(engine, 6) == rates(fresh, 6)[3:]
    assert {group["weight_decay"] for group in engine.optimizer.param_groups} == {0.3}


def test_the_values_of_the_checkpoint_apply_if_the_config_says_so(saved: str) -> None:
    engine = continued(saved, OTHER, use_checkpoint_opt_param_scheduler=True)
    whole = build(**FIRST)
    assert rates(engine, 9) == rates(whole, 9)[3:], "the length of the curve is 10, not 30"
    assert {group["weight_decay"] for group in engine.optimizer.param_groups} == {0.1}
    assert engine.total_steps == 30


def test_the_values_of_the_checkpoint_survive_a_second_resume(saved: str, tmp_path: Path) -> None:
    keys = {"use_checkpoint_opt_param_scheduler": True}
    engine = continued(saved, OTHER, **keys)
    train(engine, 1)
    again = tmp_path / "again"
    engine.save_checkpoint(again)
    resume = {**OTHER, "training": {"train_steps": 30, "resume": "auto"}}
    second = build(**{**resume, "checkpoint": {"save": str(again), **keys}})
    assert second.global_steps == 4
    assert rates(second, 9) == rates(build(**FIRST), 9)[4:]


def test_other_values_are_refused_if_neither_is_chosen(saved: str) -> None:
    with pytest.raises(CheckpointError) as error:
        continued(saved, OTHER, override_opt_param_scheduler=False)
    text = str(error.value)
    for part in (
        "optimizer.params.lr: 0.01 -> 0.5",
        "optimizer.params.weight_decay: 0.1 -> 0.3",
        "scheduler.type: 'cosine' -> 'linear'",
        "training.train_steps: 10 -> 30",
        "set checkpoint.override_opt_param_scheduler to true to use the new values, or "
        "checkpoint.use_checkpoint_opt_param_scheduler to true to use those of the checkpoint",
    ):
        assert part in text, text


def test_another_length_of_the_run_is_no_other_value_if_the_schedule_has_its_own(
    tmp_path: Path,
) -> None:
    own = {"type": "cosine", "params": {"decay_steps": 8}}
    engine = build(scheduler=own, training={"train_steps": 10})
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    longer = {"scheduler": own, "training": {"train_steps": 20}}
    assert continued(str(tmp_path), longer, override_opt_param_scheduler=False).global_steps == 2


def test_equal_values_load_with_each_setting(saved: str) -> None:
    keys: list[dict[str, bool]] = [
        {"override_opt_param_scheduler": False},
        {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": True},
    ]
    for settings in keys:
        assert continued(saved, FIRST, **settings).global_steps == 3


def test_both_settings_are_a_contradiction() -> None:
    keys = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}
    with pytest.raises(ConfigError, match="use_checkpoint_opt_param_scheduler are both true"):
        load({"train_batch_size": 1, "checkpoint": keys})
