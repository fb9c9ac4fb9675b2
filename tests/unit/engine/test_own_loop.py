"""The user's own loop around `train_batch`: records, checkpoints, resume and the end of the run."""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipemega import StopTraining, run
from pipemega.engine.engine import Engine
from pipemega.errors import NonFiniteError
from pipemega.training import Trainer
from tests.ranks.training import long_runs
from tests.ranks.training.long_runs import BACKWARD, FORWARD, build, config, sample

# Fields of records that contain measured times.
TIMES = {"step_seconds", "samples_per_second", "tokens_per_second", "peak_gib", "seconds"}


def train(engine: Engine, steps: int) -> None:
    while engine.global_steps < steps:
        engine.train_batch()


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def run_states(folder: Path) -> dict[str, Any]:
    """Return the state of the run in each checkpoint, without measured times."""
    files = sorted(folder.glob("global_step*/state.json"))
    states = {file.parent.name: json.loads(file.read_text())["run"] for file in files}
    assert all(state.pop("seconds")["training"] > 0 for state in states.values())
    return states


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_loop_without_keys_of_a_run_prints_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config()
    del settings["steps_per_print"]
    handler = signal.getsignal(signal.SIGTERM)
    engine = build(settings)
    train(engine, 3)
    engine.eval_batch(iter(batches(4)))
    engine.close()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler
    assert len(engine.take_reports()) == 3, "the reports are left to the caller"


def batches(count: int) -> list[Any]:
    dataset = long_runs.Samples()
    collate = long_runs.torch.utils.data.default_collate
    return [collate([dataset[2 * m], dataset[2 * m + 1]]) for m in range(count)]


def test_steps_per_print_alone_prints_lines_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    engine = build(config(steps_per_print=2, wall_clock_breakdown=True))
    train(engine, 4)
    engine.close()
    out = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in out.splitlines()] == ["step 2/8", "step 4/8"]
    assert "samples/s" in out
    assert "tokens/s" not in out
    assert "wall clock step 4 | data ms" in caplog.text
    assert list(tmp_path.iterdir()) == []


CASES: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "plain": ({}, {}),
    "skip": ({"training": {"on_nonfinite": {"policy": "skip"}}}, {sample(5, 2): FORWARD + 1}),
    "rollback": (
        {"training": {"on_nonfinite": {"policy": "rollback"}}},
        {sample(5, 2): BACKWARD + 1},
    ),
    "spike": ({"training": {"train_steps": 24, "loss_spikes": {"window": 20}}},
              {sample(22, 0): long_runs.FAR_LABEL}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_own_loop_and_trainer_give_the_same_records_and_checkpoints(
    case: str, tmp_path: Path
) -> None:
    changes, marks = CASES[case]

    def settings(folder: str) -> dict[str, Any]:
        return config(folder, **changes, csv_monitor={"enabled": True})

    Trainer(build(settings("trainer"), marks)).fit()
    engine = build(settings("loop"), marks)
    assert engine.config.training.train_steps is not None
    train(engine, engine.config.training.train_steps)
    engine.close()
    assert rows(Path("loop")) == rows(Path("trainer"))
    assert run_states(Path("loop")) == run_states(Path("trainer"))
    assert {p.name for p in Path("loop").iterdir()} == {p.name for p in Path("trainer").iterdir()}
    expected = {"plain": [], "skip": ["nonfinite"], "rollback": ["rollback"]}
    events = [row["name"] for row in rows(Path("loop")) if row["kind"] == "event"]
    assert events == expected.get(case, ["loss_spike"])
    assert sorted(p.name for p in Path("loop/csv/pipemega").iterdir()) == sorted(
        p.name for p in Path("trainer/csv/pipemega").iterdir()
    )


@pytest.mark.parametrize("folder", [None, "run"])
def test_the_budget_of_skip_ends_the_own_loop(folder: str | None) -> None:
    settings = config(folder, training={"on_nonfinite": {"policy": "skip", "budget": 1}})
    engine = build(settings, {sample(step, 0): FORWARD + 2 for step in (1, 2)})
    with pytest.raises(NonFiniteError, match="2 steps of this run had inf or nan"):
        train(engine, 3)
    engine.run.release()


def test_initialize_resumes_the_own_loop_with_the_callers_state() -> None:
    settings = config("run", training={"resume": "auto"})
    engine = build(settings)
    engine.client_state = {"best": 1.5}
    train(engine, 4)
    engine.close()
    assert [p.name for p in sorted(Path("run").glob("global_step*"))] == [
        "global_step3", "global_step4",
    ]  # fmt: skip
    again = build(settings)
    assert (again.global_steps, again.client_state) == (4, {"best": 1.5})
    train(again, 8)
    again.close()
    assert [row["step"] for row in rows(Path("run"))] == list(range(1, 9))
    assert run_states(Path("run"))["global_step8"]["history"]["resumes"] == 1
    # A Trainer continues an engine that has resumed, and does not resume again.
    trainer = Trainer(build(config("run", training={"resume": "auto", "train_steps": 9})))
    trainer.fit()
    assert trainer.history.resumes == 2
    assert trainer.engine.global_steps == 9


def test_a_loop_with_iterators_is_told_that_its_data_does_not_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = config("run", training={"resume": "auto"})
    first = build(settings)
    train(first, 2)
    first.close()
    engine = build(settings)
    with caplog.at_level(logging.INFO, "pipemega"):
        engine.train_batch(iter(batches(8)))
        engine.train_batch(iter(batches(8)))
    engine.close()
    (line,) = [r.getMessage() for r in caplog.records if "position" in r.getMessage()]
    assert "must skip the 16 samples that the run has consumed" in line


def saves_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list to which each write of a checkpoint adds its folder and step."""
    written: list[tuple[str, int]] = []
    save = engine.run.checkpointer.save

    def counted(folder: Any, tag: Any, client: Any, counters: Any, **options: Any) -> Any:
        written.append((os.fspath(folder), counters.global_steps))
        return save(folder, tag, client, counters, **options)

    monkeypatch.setattr(engine.run.checkpointer, "save", counted)
    return written


def test_a_step_is_saved_once_per_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(config("run", checkpoint={"interval": 2}))
    written = saves_of(engine, monkeypatch)
    for _ in range(5):
        engine.train_batch()
        path = engine.save_checkpoint("run")
        assert path == Path(f"run/global_step{engine.global_steps}")
    engine.save_checkpoint("other")
    engine.save_checkpoint("run", client_state={"epoch": 1})  # the caller's state is new
    engine.close()
    assert written == [
        ("run", 1), ("run", 2), ("run", 3), ("run", 4), ("run", 5), ("other", 5), ("run", 5),
    ]  # fmt: skip


def test_a_loaded_checkpoint_continues_the_records_at_its_step() -> None:
    engine = build(config("run", checkpoint={"interval": 2}))
    train(engine, 5)
    engine.load_checkpoint("run", "global_step2")
    train(engine, 4)
    engine.close()
    assert [row["step"] for row in rows(Path("run"))] == [1, 2, 3, 4]


def test_a_signal_saves_the_step_and_raises_stop_training() -> None:
    engine = build(config("run", checkpoint={"interval": 0}))
    engine.train_batch()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(StopTraining) as stop:
        train(engine, 8)
    assert (stop.value.reason, stop.value.code) == ("SIGUSR1", 0)
    assert Path("run/global_step2").is_dir()
    engine.close()


def test_a_loop_may_continue_after_the_last_step_of_the_run() -> None:
    """Each step after it was saved, and signals were ignored."""
    engine = build(config("run", checkpoint={"interval": 0}, training={"train_steps": 2}))
    train(engine, 5)
    assert {path.name for path in Path("run").glob("global_step*")} == {"global_step2"}
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(StopTraining):
        engine.train_batch()
    assert Path("run/global_step6").is_dir()
    engine.close()


def test_a_request_to_stop_ends_a_loop_without_other_keys() -> None:
    engine = build(config())
    engine.train_batch()
    engine.run.request_stop("the loss is low enough")
    with pytest.raises(StopTraining) as stop:
        train(engine, 8)
    assert (stop.value.reason, engine.global_steps) == ("the loss is low enough", 2)


def test_run_ends_a_stopped_loop_with_exit_code_0_and_all_records_written() -> None:
    settings = config("run", training={"exit_after_minutes": 1e-6}, checkpoint={"interval": 0})
    with pytest.raises(SystemExit) as ended, run():
        train(build(settings), 8)
    assert ended.value.code == 0
    assert Path("run/global_step1").is_dir()
    step, event = rows(Path("run"))
    assert (step["kind"], step["step"]) == ("train", 1)
    assert event["name"] == "stop"
    assert event["text"] == "stopped after step 1: training.exit_after_minutes is 1e-06"


def test_exit_interval_saves_and_ends_a_loop_and_a_trainer_at_each_multiple() -> None:
    """Evaluations and saves that are due at the same step come first; the end is no early exit."""
    training = {"exit_interval": 3, "resume": "auto"}
    settings = config("run", training=training, checkpoint={"interval": 0})
    engine = build(settings)
    with pytest.raises(StopTraining) as stop:
        train(engine, 8)
    assert (stop.value.reason, stop.value.code) == ("training.exit_interval is 3", 0)
    engine.close()
    trainer = Trainer(build(settings))
    trainer.fit()
    assert (trainer.engine.global_steps, trainer.stopped) == (6, "training.exit_interval is 3")
    last = Trainer(build(settings))
    last.fit()
    assert (last.engine.global_steps, last.stopped) == (8, "")
    assert {p.name for p in Path("run").glob("global_step*")} == {
        "global_step3", "global_step6", "global_step8",
    }  # fmt: skip


def test_exit_interval_at_the_last_step_is_the_end_of_the_run() -> None:
    trainer = Trainer(build(config("run", training={"exit_interval": 4})))
    trainer.fit()
    assert trainer.stopped == "training.exit_interval is 4"
    settings = config("run", training={"exit_interval": 4, "resume": "auto"})
    trainer = Trainer(build(settings))
    trainer.fit()
    assert (trainer.stopped, trainer.engine.global_steps) == ("", 8)


def test_the_kill_switch_file_ends_the_run_after_a_step_and_later_runs_before_the_first() -> None:
    training = {"kill_switch_path": "stop", "resume": "auto"}
    settings = config("run", training=training, checkpoint={"interval": 0})
    engine = build(settings)
    engine.train_batch()
    Path("stop").touch()
    with pytest.raises(StopTraining) as stop:
        train(engine, 8)
    assert (stop.value.reason, engine.global_steps) == (
        "training.kill_switch_path: found stop", 2,
    )  # fmt: skip
    assert Path("run/global_step2").is_dir()
    engine.close()
    engine = build(settings)
    with pytest.raises(StopTraining) as at_start:
        train(engine, 8)
    assert (at_start.value.reason, engine.global_steps) == (stop.value.reason, 2)
    engine.close()
    trainer = Trainer(build(settings))
    trainer.fit()
    assert (trainer.stopped, trainer.engine.global_steps) == (stop.value.reason, 2)
    Path("stop").unlink()
    trainer = Trainer(build(settings))
    trainer.fit()
    assert (trainer.stopped, trainer.engine.global_steps) == ("", 8)


def test_run_saves_the_last_step_of_a_loop_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    with run():
        engine = build(config("run", checkpoint={"interval": 0}))
        train(engine, 3)
    assert Path("run/global_step3").is_dir()
    assert "finished step 3 of 8: skipped 0" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_evaluations_of_a_loop_are_recorded() -> None:
    engine = build(config("run"))
    train(engine, 1)
    loss = engine.eval_batch(iter(batches(4)), split="test")
    engine.close()
    assert rows(Path("run"))[-1] == {
        "kind": "test", "split": "test", "step": 1, "consumed_samples": 8, "loss": loss,
    }  # fmt: skip
