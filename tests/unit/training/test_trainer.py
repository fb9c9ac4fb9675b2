"""The loop of a Trainer in one process: points, epochs, evaluations, state and errors."""

import json
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipemega import LayerSpec, PipelineModule, Trainer, initialize
from pipemega.errors import CheckpointError, ConfigError, DataError, PipelineError, StopTraining
from pipemega.training import (
    Accuracy,
    Callback,
    EarlyStopping,
    LRLogger,
    SampleText,
    SaveBest,
    Timing,
)
from tests.ranks.training import long_runs
from tests.ranks.training.trainer_runs import (
    EASY,
    HARD,
    METRICS,
    TRAIN,
    Points,
    Recorder,
    classifier,
    config,
    fit,
    rows,
)

STEPS = 4  # of an epoch of 30 samples, in batches of 8


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_points_are_called_in_the_documented_order() -> None:
    first, second = Recorder("first"), Recorder("second")
    order: list[str] = []
    for recorder in (first, second):
        recorder.points = order  # type: ignore[assignment]
    fit(config("run", checkpoint={"interval": 3}), [first], epochs=1, train=None)
    assert order == [
        ("before_fit", 0),
        ("after_step", 1),
        ("after_step", 2),
        ("after_step", 3),
        ("before_save", 3),
        ("after_step", 4),
        ("after_epoch", 4, 1),
        ("after_evaluation", 4),
        ("before_save", 4),
        ("after_fit", 4),
    ]
    order.clear()
    both = [first, second]
    settings = config("run", checkpoint={"interval": 3}, training={"resume": "auto"})
    fit(settings, both, epochs=2)
    assert order == [point for point in order[::2] for _ in both], "each point of both, in order"
    assert [point[0] for point in order[::2]][:3] == ["after_load", "before_fit", "after_step"]
    assert order[-2] == ("after_fit", 2 * STEPS)


def test_evaluations_have_the_values_of_each_set_by_its_name(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Values(Callback):
        def after_evaluation(self, trainer: Trainer, values: Any) -> None:
            seen.append(dict(values))

    trainer = fit(config("run"), [Values()], epochs=2)
    engine = trainer.engine
    assert [(e.step, e.split) for e in trainer.evaluations] == [
        (4, "easy"), (4, "hard"), (8, "easy"), (8, "hard"),
    ]  # fmt: skip
    for evaluation, data in zip(trainer.evaluations[-2:], (EASY, HARD), strict=True):
        (logits,) = engine.infer([data.points])
        assert evaluation.values == pytest.approx(
            {
                "loss": F.cross_entropy(logits, data.labels).item(),
                "top1": (logits.argmax(1) == data.labels).double().mean().item(),
                "top2": (logits.topk(2).indices == data.labels[:, None])
                .any(1)
                .double()
                .mean()
                .item(),
            },
            rel=1e-12,
        )
    easy, hard = (evaluation.values for evaluation in trainer.evaluations[-2:])
    assert seen[-1] == {
        **easy, **{f"easy/{k}": v for k, v in easy.items()},
        **{f"hard/{k}": v for k, v in hard.items()},
    }  # fmt: skip
    assert trainer.validation == [(e.step, e.values["loss"]) for e in trainer.evaluations[::2]]
    records = rows("run", "evaluation")
    assert [(r["step"], r["split"], r["top1"]) for r in records] == [
        (e.step, e.split, e.values["top1"]) for e in trainer.evaluations
    ]
    assert "perplexity" not in records[0]


def test_records_of_epochs_have_the_mean_loss_of_their_samples(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    trainer = fit(config("run", steps_per_print=2), epochs=2)
    steps, epochs = rows("run", "train"), rows("run", "epoch")
    assert [row["epoch"] for row in steps] == [1] * STEPS + [2] * STEPS
    assert all(row["tokens_per_second"] is None for row in steps)
    assert [(row["epoch"], row["steps"], row["samples"]) for row in epochs] == [
        (1, 4, 30),
        (2, 4, 30),
    ]
    for number, row in enumerate(epochs):
        losses = [step["loss"] for step in steps[STEPS * number : STEPS * (number + 1)]]
        sizes = [8, 8, 8, 6]
        mean = sum(x * n for x, n in zip(losses, sizes, strict=True)) / 30
        assert row["loss"] == pytest.approx(mean, rel=1e-12)
        assert row["seconds"] > 0
    out = capsys.readouterr().out
    assert "step 2/8 | epoch 1/2 | consumed samples 16 | " in out
    assert "epoch 1/2 | step 4 | consumed samples 30 | loss" in out
    assert "easy step 4 | consumed samples 30 | loss" in out
    assert "tokens/s" not in out
    assert "perplexity" not in out
    (end,) = [r.getMessage() for r in caplog.records if "finished" in r.getMessage()]
    assert "finished step 8 of 8 (2 of 2 epochs): skipped 0" in end
    assert "(training " in end
    assert "evaluation " in end
    assert trainer.timers["training"].total > 0


def test_a_run_that_ends_in_an_epoch_resumes_with_all_its_state() -> None:
    """The state of callbacks, the sums of the epoch and the evaluations continue."""

    class StopAt(Callback):
        def after_step(self, trainer: Trainer, loss: float) -> None:
            if trainer.engine.global_steps == 5:
                trainer.stop("enough for now")

    def callbacks() -> list[Any]:
        return [Recorder("counter"), EarlyStopping("loss", patience=9), SaveBest("top1")]

    whole = callbacks()
    expected = fit(config("whole"), whole, epochs=3)
    settings = config("parts", training={"resume": "auto"})
    first = fit(settings, [*callbacks(), StopAt()], epochs=3)
    assert first.stopped == "enough for now"
    assert first.engine.global_steps == 6, "a stop after a step takes effect after the next one"
    parts = callbacks()
    resumed = fit(settings, parts, epochs=3)
    assert resumed.evaluations == expected.evaluations
    for whole_one, part in zip(whole, parts, strict=True):
        assert part.state_dict() == whole_one.state_dict()
    assert whole[0].steps == 3 * STEPS
    for key in ("epoch", "step", "loss", "samples", "steps"):
        found = [row[key] for row in rows("parts", "epoch")]
        assert found == [row[key] for row in rows("whole", "epoch")]
    seconds = json.loads(Path("parts/global_step12/state.json").read_text())["run"]["seconds"]
    assert seconds["training"] > resumed.timers["training"].total, "of both processes"


def test_early_stopping_ends_the_run_like_another_stop() -> None:
    settings = config("run", optimizer={"params": {"lr": 0.0}})
    handler = signal.getsignal(signal.SIGTERM)
    recorder = Recorder()
    trainer = fit(settings, [recorder, EarlyStopping(patience=2)], epochs=9)
    assert trainer.stopped.startswith("EarlyStopping: no loss better than 1.")
    assert trainer.stopped.endswith(" in 2 evaluations")
    assert trainer.engine.epoch == 3, "the best value, and two more evaluations"
    assert [p[:2] for p in recorder.points[-2:]] == [("before_save", 12), ("after_fit", 12)]
    assert Path("run/latest").read_text().strip() == "global_step12"
    assert signal.getsignal(signal.SIGTERM) is handler
    # The script may continue with another Trainer on this engine.
    again = Trainer(trainer.engine)
    assert math.isfinite(again.fit())
    assert (again.stopped, again.engine.epoch) == ("", 9)


def best_of(folder: str) -> int:
    step: int = json.loads(Path(folder, "best/state.json").read_text())["global_steps"]
    return step


@pytest.mark.parametrize("in_background", [False, True])
def test_save_best_keeps_the_checkpoint_of_the_best_value(in_background: bool) -> None:
    values = iter([0.2, 0.5, math.nan, 0.3, 0.5, 0.1])

    class Given(SaveBest):
        def after_evaluation(self, trainer: Trainer, values_: Any) -> None:
            super().after_evaluation(trainer, {self.value: next(values)})

    changes = {"interval": STEPS, "keep_last": 1, "async": in_background}
    settings = config("run", checkpoint=changes)
    best = Given("top1", name="best")
    fit(settings, [best], epochs=3)
    assert best.best == 0.5
    assert best_of("run") == 2 * STEPS
    assert Path("run/latest").read_text().strip() == f"global_step{3 * STEPS}"
    assert {p.name for p in Path("run").iterdir() if p.is_dir()} == {"best", "global_step12"}
    # A resumed run keeps the best value: 0.3, 0.5 and 0.1 are not better.
    settings["training"] = {"progress": False, "resume": "auto"}
    fit(settings, [Given("top1", name="best")], epochs=6)
    assert best_of("run") == 2 * STEPS
    loaded = config(checkpoint={"load": "run", "load_tag": "best"})
    engine, *_ = initialize(classifier(), loaded, TRAIN)
    assert engine.global_steps == 2 * STEPS


class SaveAt(Callback):
    """Saves at a point of step 4, the last one of the first epoch."""

    def __init__(self, point: str) -> None:
        setattr(self, point, self._save)

    def _save(self, trainer: Trainer, *_: Any) -> None:
        if trainer.engine.global_steps == STEPS:
            trainer.save()


@pytest.mark.parametrize("point", ["after_step", "after_epoch", "after_evaluation"])
def test_a_checkpoint_of_a_callback_has_the_whole_step(point: str) -> None:
    """It had the epoch that had just ended as one in progress, and missed the evaluation."""
    callbacks = lambda: [SaveAt(point), EarlyStopping(patience=9)]  # noqa: E731
    whole, parts = callbacks(), callbacks()
    expected = fit(config("whole", checkpoint={"interval": 0}), whole, epochs=2)
    settings = config(
        "parts", checkpoint={"interval": 0, "load": "whole", "load_tag": "global_step4"}
    )
    resumed = fit(settings, parts, epochs=2)
    assert resumed.evaluations == expected.evaluations
    assert parts[1].state_dict() == whole[1].state_dict()
    (second,) = rows("parts", "epoch")
    assert second["samples"] == 30
    assert second["loss"] == rows("whole", "epoch")[1]["loss"]


def test_fit_continues_after_a_stop() -> None:
    class StopOnce(Callback):
        def after_epoch(self, trainer: Trainer, epoch: Any) -> None:
            if epoch.epoch == 1:
                trainer.stop("enough")

    engine, *_ = initialize(classifier(), config(), TRAIN)
    trainer = Trainer(engine, epochs=2, callbacks=[StopOnce()])
    trainer.fit()
    assert (trainer.stopped, engine.epoch) == ("enough", 1)
    trainer.fit()
    assert (trainer.stopped, engine.epoch) == ("", 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 8]),
        ({"eval_interval": 0}, []),
        ({"eval_interval": 3}, [0, 3, 6, 8]),
        ({"eval_interval": 3, "eval_on_start": False}, [3, 6, 8]),
        ({"eval_interval": 2, "eval_by": "epoch"}, [8]),
    ],
)
def test_evaluations_are_due_in_steps_or_in_epochs(
    changes: dict[str, Any], expected: list[int]
) -> None:
    trainer = fit(config(training=changes), epochs=2, valid=EASY, metrics=None)
    assert [evaluation.step for evaluation in trainer.evaluations] == expected


@pytest.mark.parametrize(("interval", "steps"), [(1, [4, 8, 12, 16, 20]), (2, [8, 16, 20])])
def test_checkpoints_are_due_in_epochs(interval: int, steps: list[int]) -> None:
    fit(config("run", checkpoint={"interval": interval, "by": "epoch"}), epochs=5)
    assert {p.name for p in Path("run").glob("global*")} == {f"global_step{n}" for n in steps}


@pytest.mark.parametrize("training", [{}, {"eval_interval": 4}])
def test_an_evaluation_that_a_stop_has_prevented_follows_in_the_resumed_run(
    training: dict[str, Any],
) -> None:
    class Stop(Callback):
        def after_step(self, trainer: Trainer, loss: float) -> None:
            if trainer.engine.global_steps == STEPS - 1:
                trainer.stop("at the end of the epoch")

    settings = config("run", training={"resume": "auto", **training})
    first = fit(settings, [Stop()], epochs=2)
    assert [e.step for e in first.evaluations if e.step] == []
    second = fit(settings, epochs=2)
    assert [e.step for e in second.evaluations if e.step] == [4, 4, 8, 8]


def test_a_run_of_steps_is_not_evaluated_without_eval_interval() -> None:
    recorder = Recorder()
    trainer = fit(config(training={"train_steps": 3}), [recorder], valid=EASY)
    assert trainer.evaluations == []
    assert [p[0] for p in recorder.points] == ["before_fit", *["after_step"] * 3, "after_fit"]


def test_a_sample_text_is_recorded_after_each_epoch() -> None:
    texts = iter(["one", "two"])
    sample = SampleText(lambda: ("once", next(texts)))
    settings = config("run", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    fit(settings, [sample], epochs=2)
    assert [(r["step"], r["text"]) for r in rows("run", "sample")] == [(4, "one"), (8, "two")]
    assert sample.last_text() == ("once", "two")


def test_no_text_is_generated_before_the_first_step() -> None:
    texts = iter(["one", "two"])
    settings = config("run", training={"train_steps": 4, "eval_interval": 2})
    trainer = fit(settings, [SampleText(lambda: ("once", next(texts)))], valid=EASY)
    assert [e.step for e in trainer.evaluations] == [0, 2, 4]
    assert [(r["step"], r["text"]) for r in rows("run", "sample")] == [(2, "one"), (4, "two")]


def test_rates_and_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    settings = config("run", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    fit(settings, [LRLogger(every=2), Timing()], epochs=2)
    scalars = [row for row in rows("run", "scalars") if "train/lr_group0" in row["values"]]
    rates = {row["step"]: row["lr"] for row in rows("run", "train")}
    assert {r["step"]: r["values"]["train/lr_group0"] for r in scalars} == {
        step: rates[step] for step in (2, 4, 6, 8)
    }
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("times step")]
    assert [line.split(" | ")[0] for line in lines] == ["times step 4", "times step 8"]
    assert "training s " in lines[0]
    assert "step ms " in lines[0]
    assert "evaluation s " in lines[1]


def test_a_rollback_restores_the_state_of_callbacks() -> None:
    marks = {long_runs.sample(5, 2): long_runs.BACKWARD + 1}
    settings = long_runs.config(
        "run", training={"on_nonfinite": {"policy": "rollback"}, "train_steps": 6}
    )
    engine = long_runs.build(settings, marks)
    recorder = Recorder()
    Trainer(engine, callbacks=[recorder]).fit()
    assert ("after_load", 3) in recorder.points
    assert recorder.steps == 6, "the steps after the checkpoint are not counted twice"


def test_a_validation_loader_of_another_batch_size_is_refused_with_the_name_of_the_set() -> None:
    loader = torch.utils.data.DataLoader(EASY, batch_size=5)
    message = (
        "validation set 'easy': the DataLoader has batch_size 5, .* make them equal, or give the "
        "dataset itself in place of the DataLoader"
    )
    with pytest.raises(ConfigError, match=message):
        fit(config(), valid={"hard": HARD, "easy": loader}, epochs=1)


class NanOnce(Points):
    """Has nan in the sample that is read as number `at`; the last step of an epoch reads 8."""

    def __init__(self, at: int) -> None:
        super().__init__(30, seed=1)
        self.reads, self.at = 0, at

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        point, label = super().__getitem__(index)
        return (point * math.nan, label) if self.reads == self.at else (point, label)


def rolled_back(at: int, interval: int) -> Trainer:
    settings = config(
        "run",
        checkpoint={"interval": interval},
        training={"on_nonfinite": {"policy": "rollback"}, "epochs": 2, "resume": "auto"},
    )
    engine, *_ = initialize(classifier(), settings, NanOnce(at))
    trainer = Trainer(engine, EASY, callbacks=[EarlyStopping(patience=9)])
    trainer.fit()
    engine.close()
    return trainer


def test_the_record_of_an_epoch_has_no_steps_of_an_earlier_one_after_a_rollback() -> None:
    """The first batch of epoch 2 fails; the checkpoint is that of step 3, in epoch 1."""
    rolled_back(at=33, interval=3)
    (row,) = rows("run", "epoch")  # that of epoch 1, at step 4, is dropped
    assert (row["epoch"], row["steps"], row["samples"]) == (2, 3, 22)


def test_a_run_that_ends_with_a_rollback_is_saved_at_its_position() -> None:
    """The last batch fails, and the checkpoint of step 7 has an earlier position in the data."""
    first = rolled_back(at=57, interval=7)
    assert (first.engine.global_steps, first.engine.epoch) == (7, 2)
    resumed = rolled_back(at=0, interval=7)
    assert (resumed.engine.global_steps, resumed.engine.epoch) == (7, 2)
    assert [e.step for e in resumed.evaluations] == [4, 7]
    assert resumed.evaluations == first.evaluations


def test_an_old_checkpoint_still_has_its_validation_losses() -> None:
    settings = config("run", training={"resume": "auto", "train_steps": 2})
    fit(settings, valid=EASY)
    path = Path("run/global_step2/state.json")
    state = json.loads(path.read_text())
    for key in ("evaluations", "epoch", "seconds", "callbacks"):
        del state["run"][key]
    state["run"]["validation"] = [[1, 2.5]]
    engine, *_ = initialize(classifier(), config(), TRAIN)
    engine.run.load_state_dict(state["run"])
    assert Trainer(engine, EASY).validation == [(1, 2.5)]


# Errors


class Broken(Callback):
    def __init__(self, point: str, error: BaseException) -> None:
        setattr(self, point, lambda *_: self._fail(error))

    def _fail(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(
    "point",
    ["before_fit", "after_step", "after_epoch", "after_evaluation", "before_save", "after_fit"],
)
def test_an_error_of_a_callback_has_its_name_and_point(point: str) -> None:
    recorder, broken = Recorder(), Broken(point, KeyError("x"))
    message = f"^callback 'Broken' failed in {point}: KeyError: 'x'$"
    with pytest.raises(PipelineError, match=message):
        fit(config("run"), [recorder, broken], epochs=1)
    assert recorder.points[-1][0] == "on_exception"
    assert "KeyError" in recorder.points[-1][2]


def test_stop_iteration_of_a_callback_is_not_the_end_of_the_data() -> None:
    with pytest.raises(PipelineError, match="callback 'Broken' failed in after_step: StopIterat"):
        fit(config(), [Broken("after_step", StopIteration())], epochs=1)


def test_stop_training_of_a_callback_is_not_a_stop_with_a_checkpoint() -> None:
    with pytest.raises(PipelineError, match=r"StopTraining: .*: to end the run, call trainer.stop"):
        fit(config(), [Broken("after_step", StopTraining("enough"))], epochs=1)


def test_an_error_in_on_exception_does_not_hide_the_first_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, recorder = Broken("after_step", ValueError("the first")), Recorder()
    second = Broken("on_exception", ValueError("the second"))
    with pytest.raises(PipelineError, match="failed in after_step: ValueError: the first"):
        fit(config(), [second, first, recorder], epochs=1)
    assert recorder.points[-1][0] == "on_exception"
    assert "callback 'Broken' failed in on_exception: ValueError: the second" in caplog.text


def test_two_callbacks_with_state_and_one_name_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        fit(config("run"), [SaveBest("top1"), SaveBest("loss", tag="low")], epochs=1)
    assert "2 callbacks with state are named 'SaveBest'" in str(caught.value)
    assert "SaveBest(..., name='other')" in str(caught.value)
    assert caught.value.on_every_rank
    fit(config("run"), [SaveBest("top1"), SaveBest("loss", tag="low", name="low")], epochs=1)
    assert Path("run/low/state.json").exists()
    assert best_of("run") == STEPS


@pytest.mark.parametrize(
    ("callback", "what"), [(SaveBest, "the class SaveBest: call it"), ("best", "one is best")]
)
def test_what_is_no_callback_is_refused(callback: Any, what: str) -> None:
    with pytest.raises(ConfigError, match="callbacks is a LRLogger: give a list"):
        fit(config(), LRLogger(), epochs=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=what):
        fit(config(), [callback], epochs=1)


def test_a_resumed_run_needs_the_callbacks_whose_state_was_saved() -> None:
    settings = config("run", training={"resume": "auto"})
    fit(settings, [Recorder("mine"), EarlyStopping()], epochs=1)
    with pytest.raises(CheckpointError) as caught:
        fit(settings, [EarlyStopping()], epochs=2)
    assert str(caught.value) == (
        "the checkpoint has the state of the callback 'mine', and this Trainer has no such "
        "callback with state (it has: EarlyStopping): add it, or set checkpoint.allow_changes "
        '["callbacks.mine"] to drop its state'
    )
    assert caught.value.on_every_rank
    settings["checkpoint"]["allow_changes"] = ["callbacks.mine"]
    early = EarlyStopping()
    trainer = fit(settings, [early], epochs=2)
    assert early.best == min(loss for _, loss in trainer.validation)
    settings["checkpoint"]["allow_changes"] = ["callbacks"]
    fit(settings, epochs=3)


def test_the_own_loop_keeps_the_state_of_callbacks() -> None:
    settings = config("run", training={"resume": "auto"})
    fit(settings, [Recorder("mine")], epochs=1)
    engine, *_ = initialize(classifier(), settings | {"training": {"resume": "auto"}}, TRAIN)
    engine.train_batch()
    engine.close()
    again, *_ = initialize(classifier(), settings, TRAIN)
    recorder = Recorder("mine")
    Trainer(again, callbacks=[recorder])
    assert recorder.steps == STEPS


def test_state_that_json_cannot_hold_is_refused() -> None:
    class Tensors(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"sum": torch.ones(2)}

    with pytest.raises(CheckpointError, match="state of the callback 'Tensors' cannot be saved"):
        fit(config("run"), [Tensors()], epochs=1)


def test_an_error_in_the_state_of_a_callback_has_its_name() -> None:
    class Broken(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"sum": [][0]}  # type: ignore[misc]

    class Strict(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"one": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("two")

    settings = config("run", training={"resume": "auto"})
    with pytest.raises(PipelineError, match="callback 'Broken' failed in state_dict: IndexError"):
        fit(config("other"), [Broken()], epochs=1)
    fit(settings, [Strict()], epochs=1)
    with pytest.raises(PipelineError, match="'Strict' failed in load_state_dict: KeyError: 'two'"):
        fit(settings, [Strict()], epochs=2)


@pytest.mark.parametrize(
    ("callback", "changes", "message"),
    [
        (
            SaveBest("top3"), {},
            "SaveBest('top3'): an evaluation has no such value; did you mean 'top1' or 'top2'?",
        ),
        (SaveBest("top1"), {"folder": None}, "SaveBest('top1') saves in checkpoint.save, which is"),
        (
            EarlyStopping("top1"), {"valid": None},
            "EarlyStopping('top1') needs evaluations: give Trainer(engine, valid), and do not set "
            "training.eval_interval to 0",
        ),
        (
            EarlyStopping("mine"), {"metrics": {"mine": type("Mine", (Accuracy,),
                                                             {"higher_is_better": None})()}},
            "EarlyStopping('mine'): it is not known whether larger values are better: give mode=",
        ),
    ],
)  # fmt: skip
def test_a_value_that_no_evaluation_has_is_refused_before_the_first_step(
    callback: Callback, changes: dict[str, Any], message: str
) -> None:
    settings = config(changes.pop("folder", "run"))
    with pytest.raises(ConfigError) as caught:
        fit(settings, [callback], epochs=1, **changes)
    assert message in str(caught.value)
    assert caught.value.on_every_rank


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping(patience=0),
        lambda: EarlyStopping(min_delta=-1.0),
        lambda: SaveBest("loss", "smallest"),  # type: ignore[arg-type]
        lambda: LRLogger(every=0),
    ],
)
def test_arguments_of_callbacks_are_checked(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"at least|use 'min' or 'max'"):
        make()


def test_metrics_of_a_model_that_returns_its_loss_are_refused() -> None:
    class LossLayer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    net = PipelineModule([LayerSpec(LossLayer, 6, 1, dtype=torch.float64)], lambda out, _: out)
    engine, *_ = initialize(net, config(training={"epochs": 1}), TRAIN)
    with pytest.raises((DataError, PipelineError)) as caught:
        Trainer(engine, EASY, metrics=METRICS).fit()
    assert "metrics top1, top2 need the outputs of the model, and no rank has them" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["", "two words", 3])
def test_names_of_validation_sets_are_checked(name: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a validation set"):
        fit(config(), epochs=1, valid={name: EASY})


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the run has no length: set training.train_steps"):
        fit(config())
    steps = {"train_steps": 3, "eval_by": "epoch", "eval_interval": 1}
    with pytest.raises(ConfigError, match=r"training.eval_by is 'epoch', and the run has no epoc"):
        fit(config(training=steps))
    saves = {"interval": 1, "by": "epoch"}
    with pytest.raises(ConfigError, match=r"checkpoint.by is 'epoch', and the run has no epochs"):
        fit(config("run", checkpoint=saves, training={"train_steps": 3}))
    with pytest.raises(ConfigError, match="both set the length of the run"):
        fit(config(training={"train_steps": 3}), epochs=2)
    with pytest.raises(ConfigError, match="the engine has training data already"):
        fit(config(), epochs=2, train=TRAIN)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            None,
            "validation set 'once': list_iterator yielded no sample in epoch 0: give data that ",
        ),
        (1, "validation set 'once' ended before training.eval_steps (1) batches: give data that "),
    ],
)
def test_validation_data_that_can_be_read_once_are_refused(steps: int | None, message: str) -> None:
    """The end of such data looked like the end of the training data."""
    once = iter([EASY[index] for index in range(8)])
    with pytest.raises(DataError) as caught:
        fit(config(training={"eval_steps": steps}), epochs=2, valid={"once": once})
    assert f"{message}start again at each iter(), not a generator" in str(caught.value)


def test_an_evaluation_before_fit_counts() -> None:
    engine, *_ = initialize(classifier(), config(), TRAIN)
    early = EarlyStopping("top1", patience=1)
    trainer = Trainer(engine, EASY, epochs=1, metrics=METRICS, callbacks=[early])
    loss = trainer.evaluate()
    assert trainer.validation == [(0, loss)]
    assert early.best == trainer.evaluations[0].values["top1"]


def test_the_training_data_of_a_trainer_resume_too() -> None:
    def trained(folder: str, epochs: int) -> Any:
        settings = config(folder, training={"resume": "auto"})
        engine, *_ = initialize(classifier(), settings)
        Trainer(engine, train=TRAIN, epochs=epochs).fit()
        return {n: p.tolist() for n, p in engine.parameter_state().items()}

    trained("parts", 1)
    assert trained("parts", 3) == trained("whole", 3)
    assert len(Points(3, seed=1)) == 3


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_in_the_evaluation_before_the_first_step_ends_the_run_there(resumed: bool) -> None:
    """One more step was trained and saved; a checkpoint of this point lacked later callbacks."""

    class SaveAndStop(Callback):
        def after_evaluation(self, trainer: Trainer, values: Any) -> None:
            trainer.save("kept")
            trainer.stop("enough")

    recorder = Recorder()
    training = {"train_steps": 4, "eval_interval": 9, "resume": "auto" if resumed else False}
    first = STEPS // 2 if resumed else 0
    if resumed:
        settings = config(
            "run", checkpoint={"interval": first}, training=training | {"eval_interval": 0}
        )
        engine, *_ = initialize(classifier(), settings, TRAIN)
        for _ in range(first):
            engine.train_batch()
        training["eval_interval"] = first
    trainer = fit(config("run", training=training), [SaveAndStop(), recorder])
    assert (trainer.stopped, trainer.engine.global_steps) == ("enough", first)
    assert recorder.points[-1] == ("after_fit", first)
    state = json.loads(Path("run/kept/state.json").read_text())["run"]["callbacks"]
    assert [p[0] for p in recorder.points if p[0] != "after_load"][:3] == [
        "before_fit", "after_evaluation", "before_save",
    ]  # fmt: skip
    assert state == {"Recorder": {"steps": 0}}
