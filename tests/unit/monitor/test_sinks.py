"""The files that sinks write, and sinks that cannot write."""

import csv
import json
import logging
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError
from pipemega.monitor import (
    Console,
    CsvSink,
    EvalRecord,
    JsonLinesSink,
    Monitor,
    ResumePoint,
    ScalarRecord,
    Sink,
    TensorboardSink,
    build_sinks,
)
from tests.unit.monitor.sample_records import (
    epoch_record,
    eval_record,
    picture_record,
    step_record,
    timeline_record,
)

LOGGER = logging.getLogger("pipemega.test_monitor")
AT_TWO = ResumePoint(step=2, consumed_samples=64)


def write(sink: Sink, steps) -> None:
    sink.open()
    for step in steps:
        sink.write(step_record(step))
    sink.close()


def rows(path: Path) -> list[dict]:
    def no_constant(text):
        raise AssertionError(f"{text} is not JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


# --- JSON lines ---


def test_a_record_is_one_line_of_json_with_every_field(tmp_path):
    sink = JsonLinesSink(tmp_path / "deep" / "metrics.jsonl")
    sink.write(step_record(1, extra={"perf/forward_ms": 2.0}))
    sink.write(EvalRecord(step=1, consumed_samples=32, loss=0.0, seconds=1.0, has_tokens=True))
    step, evaluation = rows(tmp_path / "deep" / "metrics.jsonl")  # flushed before it is closed
    sink.close()
    assert step["kind"] == "train"
    assert step["grad_norm"] == 1.25
    assert step["loss_scale"] is None
    assert step["extra"] == {"perf/forward_ms": 2.0}
    assert evaluation["kind"] == "validation"
    assert evaluation["perplexity"] == 1.0


def test_epochs_named_sets_and_own_numbers_have_lines(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(epoch_record())
    sink.write(eval_record(split="clean", has_tokens=False, metrics={"top1": 0.5}))
    sink.write(ScalarRecord(step=20, consumed_samples=640, values={"mine": 2.0, "perf/x": 1.0}))
    sink.write(step_record(21, consumed_tokens=None, tokens_per_second=None))
    sink.close()
    epoch, evaluation, own, step = rows(tmp_path / "m.jsonl")
    assert (epoch["kind"], epoch["epoch"], epoch["samples_per_second"]) == ("epoch", 2, 157.5)
    assert (evaluation["kind"], evaluation["split"]) == ("evaluation", "clean")
    assert evaluation["top1"] == 0.5
    assert "perplexity" not in evaluation
    assert (own["kind"], own["values"]) == ("scalars", {"mine": 2.0, "perf/x": 1.0})
    assert step["tokens_per_second"] is step["consumed_tokens"] is None


def test_non_finite_numbers_are_json_strings_that_float_reads(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(step_record(1, loss=math.nan, grad_norm=math.inf, extra={"x": -math.inf}))
    sink.close()
    (row,) = rows(tmp_path / "m.jsonl")
    assert (row["loss"], row["grad_norm"], row["extra"]) == ("nan", "inf", {"x": "-inf"})
    assert math.isnan(float(row["loss"]))


def test_a_resumed_run_writes_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(JsonLinesSink(path), [1, 2, 3, 4])
    write(JsonLinesSink(path, AT_TWO), [3, 4, 5])
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_incomplete_last_line_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(JsonLinesSink(path), [1, 2])
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 2, "loss')
    write(JsonLinesSink(path, AT_TWO), [3])
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def test_a_new_run_does_not_overwrite_the_file_of_an_old_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ([1], [1, 2], [1, 2, 3]):
        write(JsonLinesSink(path), steps)
    counts = {p.name: len(rows(p)) for p in tmp_path.iterdir()}
    assert counts == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


# --- csv ---


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_file_per_tag_over_consumed_samples(tmp_path):
    sink = CsvSink(tmp_path / "job")
    sink.write(step_record(1, loss=math.nan))
    sink.write(EvalRecord(step=1, consumed_samples=32, loss=0.0, seconds=1.0))
    sink.write(eval_record(split="clean", has_tokens=False, metrics={"top1": 0.5}))
    sink.write(ScalarRecord(step=20, consumed_samples=640, values={"mine": 2.0}))
    sink.close()
    train = table(tmp_path / "job" / "train_loss.csv")
    evaluation = table(tmp_path / "job" / "eval_loss.csv")
    named = table(tmp_path / "job" / "eval_clean_top1.csv")
    assert train == [["step", "loss"], ["32", "nan"]]
    assert evaluation == [["step", "loss"], ["32", "0.0"]]
    assert named == [["step", "top1"], ["640", "0.5"]]
    assert table(tmp_path / "job" / "train_mine.csv") == [["step", "mine"], ["640", "2.0"]]
    assert not (tmp_path / "job" / "eval_perplexity.csv").exists()


def test_csv_files_are_continued_without_a_second_heading_or_row(tmp_path):
    write(CsvSink(tmp_path), [1, 2, 3])
    write(CsvSink(tmp_path, AT_TWO), [3, 4])
    path = tmp_path / "train_loss.csv"
    assert [row[0] for row in table(path)] == ["step", "32", "64", "96", "128"]
    write(CsvSink(tmp_path), [1])
    assert [row[0] for row in table(path)] == ["step", "32"]
    assert len(table(tmp_path / "train_loss.1.csv")) == 5


# --- tensorboard ---


def test_tensorboard_has_deepspeeds_tags_over_samples_and_hides_repeated_points(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorboardSink(tmp_path), [1, 2, 3])
    write(TensorboardSink(tmp_path, AT_TWO), [3, 4])
    events = EventAccumulator(str(tmp_path)).Reload()
    points = events.Scalars("train/loss")
    assert [point.step for point in points] == [32, 64, 96, 128]
    assert {"train/lr", "train/grad_norm"} <= set(events.Tags()["scalars"])


def test_tensorboard_shows_the_picture_of_a_timeline(tmp_path):
    pytest.importorskip("tensorboard")
    image = pytest.importorskip("matplotlib.image")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    image.imsave(tmp_path / "step-10.png", [[0.0, 1.0]])
    sink = TensorboardSink(tmp_path / "events")
    sink.open()
    sink.write(timeline_record(picture=tmp_path / "step-10.png"))
    sink.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (shown,) = events.Images("perf/timeline")
    assert (shown.step, shown.width, shown.height) == (320, 2, 1)
    assert "perf/pipeline_makespan" in events.Tags()["scalars"]


def test_a_timeline_is_one_line_of_json_with_the_numbers_of_each_rank(tmp_path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.write(timeline_record(picture=tmp_path / "a.png"))
    sink.close()
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert (row["kind"], row["step"], row["busy"]) == ("timeline", 10, [0.2, 0.15])
    assert row["picture"] == str(tmp_path / "a.png")


def test_a_picture_is_one_line_of_json_and_an_image_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    image = pytest.importorskip("matplotlib.image")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    image.imsave(tmp_path / "a.png", [[0.0, 1.0]])
    sinks = [TensorboardSink(tmp_path / "events"), JsonLinesSink(tmp_path / "metrics.jsonl")]
    for sink in sinks:
        sink.open()
        sink.write(picture_record(tmp_path / "a.png"))
        sink.close()
    (shown,) = EventAccumulator(str(tmp_path / "events")).Reload().Images("moe/loads")
    assert shown.step == 640
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert (row["kind"], row["step"]) == ("picture", 20)
    assert row["picture"] == str(tmp_path / "a.png")


def test_a_missing_tensorboard_package_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tensorboard\]'"):
        TensorboardSink(tmp_path)


# --- failure ---


class Broken(Sink):
    name = "broken"

    def __init__(self) -> None:
        self.writes = 0
        self.closed = False

    def write(self, record) -> None:
        self.writes += 1
        raise RuntimeError("server on fire")

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("still on fire")

    def state_dict(self):
        return {"id": "kept"}


def test_a_sink_that_fails_is_reported_once_and_switched_off(tmp_path, caplog):
    broken = Broken()
    monitor = Monitor([broken, JsonLinesSink(tmp_path / "m.jsonl")], LOGGER)
    write(monitor, [1, 2, 3])
    assert (broken.writes, broken.closed) == (1, True)
    assert len(rows(tmp_path / "m.jsonl")) == 3
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= 30]
    assert message == (
        "the monitor 'broken' failed at step 1 and is off for the rest of this run, "
        "which continues: RuntimeError: server on fire"
    )


def test_the_state_of_a_sink_is_kept_after_its_failure():
    monitor = Monitor([Broken()], LOGGER, state={"wandb": {"id": "of a run with wandb off"}})
    write(monitor, [1])
    assert monitor.state_dict() == {
        "wandb": {"id": "of a run with wandb off"},
        "broken": {"id": "kept"},
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_stop_the_run(caplog):
    monitor = Monitor([JsonLinesSink("/dev/full")], LOGGER)
    write(monitor, [1, 2])
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= 30]
    assert message.startswith("the monitor 'jsonl' failed at step 1")
    assert "No space left on device" in message
    assert monitor.names == ()


# --- from the configuration ---


def config(**sections):
    def section(**values):
        return SimpleNamespace(**values)

    off = {"enabled": False, "output_path": "", "job_name": "job"}
    return SimpleNamespace(
        mesh=SimpleNamespace(timeout_seconds=600.0),
        monitor=section(jsonl=sections.get("jsonl"), metric_names="grouped"),
        csv_monitor=section(**(off | sections.get("csv_monitor", {}))),
        tensorboard=section(**(off | sections.get("tensorboard", {}))),
        wandb=section(enabled=False),
    )


def test_every_monitor_section_of_a_config_is_used(tmp_path):
    pytest.importorskip("wandb")
    sections = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    real = load(
        {
            "train_batch_size": 8,
            "steps_per_print": 5,
            "training": {"train_steps": 3},
            "csv_monitor": sections,
            "tensorboard": sections,
            "wandb": {"enabled": True, "mode": "disabled", "tags": ["a"]},
        }
    )
    monitor = build_sinks(real, tmp_path, Console, logger=LOGGER)
    assert monitor.names == ("console", "jsonl", "csv_monitor", "tensorboard", "wandb")
    monitor.close()


def test_console_and_json_lines_are_always_on(tmp_path, capsys):
    monitor = build_sinks(config(), tmp_path, partial(Console, 3, 1), logger=LOGGER)
    assert monitor.names == ("console", "jsonl")
    write(monitor, [1, 2])
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert capsys.readouterr().out.startswith("step 1/3 | ")


def test_an_empty_output_path_means_the_run_folder_and_a_given_one_is_used(tmp_path):
    theirs = tmp_path / "theirs"
    chosen = config(
        csv_monitor={"enabled": True},
        tensorboard={"enabled": True, "output_path": str(theirs)},
        jsonl=str(tmp_path / "numbers.jsonl"),
    )
    monitor = build_sinks(chosen, tmp_path / "run", Console, logger=LOGGER)
    write(monitor, [1])
    assert (tmp_path / "numbers.jsonl").exists()
    assert (tmp_path / "run/csv/job/train_lr.csv").exists()
    assert list((theirs / "job").glob("events.out.tfevents.*"))


def test_a_folder_that_cannot_be_created_is_logged_and_the_run_continues(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    chosen = config(jsonl=str(tmp_path / "file" / "metrics.jsonl"))
    monitor = build_sinks(chosen, tmp_path, Console, logger=LOGGER)
    assert monitor.names == ("console",)
    assert "a monitor could not be opened and is off for this run" in caplog.text
