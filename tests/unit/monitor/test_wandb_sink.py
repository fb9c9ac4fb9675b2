"""The wandb sink: with the real package offline, and with a fake of the package."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemega.errors import ConfigError
from pipemega.monitor import (
    EvalRecord,
    EventRecord,
    Monitor,
    SampleRecord,
    WandbOptions,
    WandbSink,
)
from tests.ranks.training import long_runs
from tests.unit.monitor.sample_records import (
    eval_record,
    picture_record,
    step_record,
    timeline_record,
)

LOGGER = logging.getLogger("pipemega.test_monitor")


class Refused(Exception):
    pass


class FakeWandb:
    """The part of wandb that the sink uses; `offline_only`: a key, but no server that answers."""

    Error = Refused

    def __init__(self, *, key: bool = True, setting: str = "online", offline_only: bool = False):
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.points: list[int] = []
        self.alerts: list[tuple[str, str, str]] = []
        self.metrics: dict[str, str | None] = {}
        self.finished = False
        self.broken = False
        self._key = key
        self._setting = setting
        self._offline_only = offline_only

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode=self._setting))

    def login(self, *, prompt: bool):
        assert prompt is False
        return self._key

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        if self._offline_only and arguments["mode"] == "online":
            raise Refused("no such host\nconsider this and that")
        self.id = arguments["id"] or "new-id"
        return self

    def Image(self, path):
        return "image", path

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, point, step):
        if self.broken:
            raise Refused("server on fire")
        self.logged.append(point)
        self.points.append(step)

    def Table(self, columns, data):
        return columns, data

    def alert(self, title, text, level):
        self.alerts.append((title, text, level))

    def finish(self):
        self.finished = True


def sink(tmp_path, module, config=None, **options) -> WandbSink:
    options = WandbOptions(**options)
    made = WandbSink(tmp_path, options, logger=LOGGER, module=module, config=config)
    made.open()
    return made


def test_a_point_has_its_axes_and_grouped_names(tmp_path):
    wandb = FakeWandb()
    made = sink(tmp_path, wandb)
    made.write(step_record(3, loss=2.0, extra={"Mine/x": 1.0}))
    made.write(EvalRecord(step=3, consumed_samples=96, loss=0.0, seconds=1.0))
    made.write(eval_record(split="clean", metrics={"top1": 0.5}))
    made.close()
    step, evaluation, named = wandb.logged
    assert (named["eval/clean/top1"], named["step"]) == (0.5, 20)
    assert (step["step"], step["consumed_samples"], step["train/loss"]) == (3, 96, 2.0)
    assert step["consumed_tokens"] == step["train/consumed_tokens"] == 3 * 4096
    assert step["perf/tokens_per_second"] == 8192.4
    assert step["Mine/x"] == 1.0
    assert "train/loss_scale" not in step
    assert evaluation["eval/loss"] == 0.0
    axes = dict.fromkeys(["step", "consumed_samples", "consumed_tokens"])
    groups = ("train", "epoch", "eval", "test", "perf", "memory", "moe", "event")
    assert wandb.metrics == axes | {f"{group}/*": "consumed_samples" for group in groups}
    assert wandb.points == sorted(set(wandb.points)), "wandb drops points that do not increase"
    assert wandb.finished


def test_a_timeline_is_logged_with_its_picture(tmp_path):
    wandb = FakeWandb()
    made = sink(tmp_path, wandb)
    made.write(timeline_record(picture=tmp_path / "step-10.png"))
    made.write(timeline_record())
    drawn, plain = wandb.logged
    assert drawn["perf/timeline"] == ("image", str(tmp_path / "step-10.png"))
    assert drawn["perf/pipeline_bubble"] == 0.125
    assert (drawn["step"], drawn["consumed_samples"]) == (10, 320)
    assert "perf/timeline" not in plain


def test_a_picture_of_the_steps_so_far_is_an_image(tmp_path):
    wandb = FakeWandb()
    made = sink(tmp_path, wandb)
    made.write(picture_record(tmp_path / "a.png"))
    (point,) = wandb.logged
    assert point == {
        "moe/loads": ("image", str(tmp_path / "a.png")), "step": 20, "consumed_samples": 640,
    }  # fmt: skip


def test_with_deepspeeds_names_the_metrics_are_those_of_deepspeed(tmp_path):
    wandb = FakeWandb()
    made = WandbSink(tmp_path, logger=LOGGER, module=wandb, names="deepspeed")
    made.open()
    made.write(step_record(3, loss=2.0, extra={"Mine/x": 1.0, "perf/optimizer_ms": 7.0}))
    made.write(EvalRecord(step=3, consumed_samples=96, loss=0.0, seconds=1.0))
    step, evaluation = wandb.logged
    assert step["Train/Samples/train_loss"] == 2.0
    assert step["Train/Samples/elapsed_time_ms_step"] == 7.0
    assert step["Mine/x"] == 1.0
    assert evaluation["Train/Samples/eval_loss"] == 0.0
    assert wandb.metrics["Train/Samples/*"] == "consumed_samples"


@pytest.mark.parametrize(
    ("name", "title", "level"),
    [
        ("nonfinite", "inf or nan", "ERROR"),
        ("loss_spike", "loss spike", "WARN"),
        ("stop", "run stopped", "INFO"),
    ],
)
def test_events_are_alerts(tmp_path, name, title, level):
    wandb = FakeWandb()
    made = sink(tmp_path, wandb)
    for kind in (name, "straggler"):
        made.write(EventRecord(step=3, consumed_samples=96, name=kind, values={}, text="it was so"))
    assert wandb.alerts == [(title, "it was so", level)]


def test_generated_texts_are_rows_of_a_table(tmp_path):
    wandb = FakeWandb()
    made = sink(tmp_path, wandb)
    for step, text in ((2, "os"), (4, "sys")):
        made.write(SampleRecord(step=step, consumed_samples=step, prompt="import ", text=text))
    columns, rows = wandb.logged[-1]["eval/samples"]
    assert columns == ["step", "prompt", "text"]
    assert rows == [[2, "import ", "os"], [4, "import ", "sys"]]


def test_a_resumed_run_continues_the_wandb_run(tmp_path):
    wandb = FakeWandb()
    state = Monitor([sink(tmp_path, wandb)], LOGGER).state_dict()
    assert state["wandb"]["id"] == wandb.id
    again = FakeWandb()
    sink(tmp_path, again, id=state["wandb"]["id"])
    assert (again.inits[0]["id"], again.inits[0]["resume"]) == (wandb.id, "allow")


def test_the_id_is_known_before_the_server_has_answered(tmp_path):
    wandb = FakeWandb()
    made = WandbSink(tmp_path, logger=LOGGER, module=wandb)
    state = made.state_dict()
    made.open()
    assert state["id"] == wandb.id
    assert made.state_dict() == state
    # With "auto" wandb itself determines the id.
    options = WandbOptions(resume="auto")
    other = WandbSink(tmp_path, options, logger=LOGGER, module=FakeWandb())
    assert other.state_dict() == {}
    other.open()
    assert other.state_dict()["id"] == "new-id"


def test_all_options_are_passed_to_wandb(tmp_path):
    wandb = FakeWandb()
    sink(
        tmp_path,
        wandb,
        config={"seed": 1},
        project="p",
        entity="team",
        group="g",
        name="n",
        tags=("a", "b"),
        resume="must",
        id="r",
    )
    expected = {
        "dir": str(tmp_path),
        "config": {"seed": 1},
        "project": "p",
        "entity": "team",
        "group": "g",
        "name": "n",
        "tags": ["a", "b"],
        "resume": "must",
        "id": "r",
        "mode": "online",
    }
    assert expected.items() <= wandb.inits[0].items()


def test_without_a_key_the_run_is_offline_with_a_warning(tmp_path, caplog):
    wandb = FakeWandb(key=False)
    sink(tmp_path, wandb)
    assert [init["mode"] for init in wandb.inits] == ["offline"]
    assert "wandb is offline" in caplog.text
    assert "there is no API key" in caplog.text


def test_without_a_server_the_run_is_offline_with_a_warning(tmp_path, caplog):
    wandb = FakeWandb(offline_only=True)
    sink(tmp_path, wandb, mode="online", id="kept")
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"]
    assert wandb.inits[1]["id"] == "kept"
    assert caplog.text.strip().endswith("no such host")


@pytest.mark.parametrize(("mode", "setting"), [("disabled", "online"), (None, "disabled")])
def test_a_mode_other_than_online_needs_no_key(tmp_path, mode, setting):
    wandb = FakeWandb(key=False, setting=setting)
    sink(tmp_path, wandb, mode=mode)
    assert [init["mode"] for init in wandb.inits] == ["disabled"]


def test_a_wandb_that_raises_does_not_stop_the_run(tmp_path, caplog):
    wandb = FakeWandb()
    monitor = Monitor([sink(tmp_path, wandb)], LOGGER)
    monitor.write(step_record(1))
    wandb.broken = True
    monitor.write(step_record(2))
    monitor.write(step_record(3))
    assert caplog.text.count("server on fire") == 1
    assert "the monitor 'wandb' failed at step 2 and is off" in caplog.text
    assert wandb.finished
    assert monitor.state_dict()["wandb"]["id"] == wandb.id


def test_a_missing_wandb_package_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"set wandb\.enabled to false"):
        WandbSink(tmp_path, logger=LOGGER)


OFFLINE = """
import os, pipemega, sys
import torch._dynamo  # the optimizer imports it
from tests.ranks.training import long_runs

for _ in range(2):  # two processes, one after the other, that import torch once
    if not (child := os.fork()):
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
else:
    sys.exit()
settings = long_runs.config(
    "runs/mine",
    steps_per_print=1,
    training={"resume": "auto", "on_nonfinite": {"policy": "skip"}},
    checkpoint={"interval": 0},
    wandb={"enabled": True, "mode": "offline"},
)
with pipemega.run():
    assert "wandb" not in sys.modules, "imported before it is used"
    engine = long_runs.build(settings, {long_runs.sample(2, 0): long_runs.FORWARD})
    last = engine.global_steps + 2
    while engine.global_steps < last:
        engine.train_batch()
    engine.run.add_sample("import ", "os")
"""


def stored_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: protobuf messages in LevelDB's log format."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, message = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (rest := 32768 - position % 32768) < 7:  # the end of a block
            position += rest
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        message += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole message, or its last part
            yield messages.Record.FromString(message)
            message = b""


def test_the_parts_of_an_offline_run_are_one_run_with_all_facts(tmp_path):
    # In subprocesses: wandb prints at exit, and its service process must end with the test.
    pytest.importorskip("wandb")
    (tmp_path / "loop.py").write_text(OFFLINE)
    root = Path(__file__).parents[3]
    home = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**home, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "runs/mine/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in stored_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1
    assert {run.display_name for run in runs} == {"mine"}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["train_micro_batch_size_per_gpu"] == long_runs.MICRO
    facts = config["run"]
    assert (facts["world_size"], facts["num_parameters"]) == (1, 6 * (4 * 4 + 4))
    assert facts["batch"]["train_batch_size"] == 8
    assert {"mesh", "git_commit", "torch"} <= facts.keys()
    history = [record.history for record in records if record.HasField("history")]
    points = [point.step.num for point in history]
    assert points == sorted(set(points)), "wandb sync drops points that do not increase"
    values = [{item.nested_key[0]: item.value_json for item in point.item} for point in history]
    assert [point["step"] for point in values if "train/loss" in point] == ["1", "2", "3", "4"]
    assert "memory/rank0_gib" in values[0]
    assert sum("eval/samples" in point for point in values) == 2
    (alert,) = [record.alert for record in records if record.HasField("alert")]
    assert alert.title == "inf or nan"
    assert alert.text.startswith("loss is nan at step 2")


STOPPED = """
import logging, os, signal, sys, time
from pipemega.monitor import BackgroundSink, Monitor, WandbOptions, WandbSink
from pipemega.monitor.wandb_sink import _children
from tests.ranks.training import long_runs
from tests.unit.monitor.sample_records import eval_record, step_record

sink = WandbSink(sys.argv[1], WandbOptions(mode="offline"), logger=logging.getLogger("t"))
monitor = Monitor([BackgroundSink(sink, close_seconds=0.5)], logging.getLogger("t"))
monitor.write(step_record(1))
while not (_children("wandb-core") and hasattr(sink, "_run")):
    time.sleep(0.05)
for process in _children("wandb-core"):
    os.kill(process, signal.SIGSTOP)
monitor.write(step_record(2))
started = time.monotonic()
monitor.close()
print("closed after", time.monotonic() - started)
"""


def test_a_hanging_wandb_service_delays_neither_the_run_nor_its_end(tmp_path):
    pytest.importorskip("wandb")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=40,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    assert "closed after" in done.stdout
    assert "the monitor 'wandb' failed when it was closed: TimeoutError" in done.stderr
