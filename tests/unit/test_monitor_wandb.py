"""The wandb sink: once for real, offline; the rest against a stand-in for the package."""

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pipemega.errors import ConfigError
from pipemega.monitor import EvalRecord, Monitor, WandbSink
from tests.unit.monitor_records import step_record, timeline_record

LOGGER = logging.getLogger("pipemega.test_monitor")


class Refused(Exception):
    pass


class StandIn:
    """As much of wandb as the sink uses; `offline_only` has a key, but no server that answers."""

    Error = Refused

    def __init__(self, *, key: bool = True, setting: str = "online", offline_only: bool = False):
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
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

    def log(self, point):
        if self.broken:
            raise Refused("server on fire")
        self.logged.append(point)

    def finish(self):
        self.finished = True


def sink(tmp_path, module, **arguments) -> WandbSink:
    made = WandbSink(tmp_path, logger=LOGGER, module=module, **arguments)
    made.open()
    return made


def test_a_point_carries_both_axes_and_deepspeeds_tags(tmp_path):
    wandb = StandIn()
    made = sink(tmp_path, wandb)
    made.write(step_record(3, loss=2.0, extra={"Mine/x": 1.0}))
    made.write(EvalRecord(step=3, consumed_samples=96, loss=0.0, seconds=1.0))
    made.close()
    step, evaluation = wandb.logged
    assert (step["step"], step["samples"], step["Train/Samples/train_loss"]) == (3, 96, 2.0)
    assert step["Mine/x"] == 1.0
    assert "Train/Samples/loss_scale" not in step
    assert evaluation["Train/Samples/eval_loss"] == 0.0
    assert wandb.metrics == {"step": None, "samples": None, "Train/Samples/*": "samples"}
    assert wandb.finished


def test_a_timeline_brings_its_picture(tmp_path):
    wandb = StandIn()
    made = sink(tmp_path, wandb)
    made.write(timeline_record(picture=tmp_path / "step-10.png"))
    made.write(timeline_record())
    drawn, plain = wandb.logged
    assert drawn["Train/Samples/timeline"] == ("image", str(tmp_path / "step-10.png"))
    assert drawn["Train/Samples/pipeline_bubble"] == 0.125
    assert (drawn["step"], drawn["samples"]) == (10, 320)
    assert "Train/Samples/timeline" not in plain


def test_a_resumed_run_is_the_same_run(tmp_path):
    wandb = StandIn()
    state = Monitor([sink(tmp_path, wandb)], LOGGER).state_dict()
    assert state == {"wandb": {"id": wandb.id}}
    again = StandIn()
    sink(tmp_path, again, run_id=state["wandb"]["id"])
    assert (again.inits[0]["id"], again.inits[0]["resume"]) == (wandb.id, "allow")


def test_the_id_is_known_before_the_server_has_answered(tmp_path):
    wandb = StandIn()
    made = WandbSink(tmp_path, logger=LOGGER, module=wandb)
    state = made.state_dict()
    made.open()
    assert state == {"id": wandb.id} == made.state_dict()
    # What these mean, wandb finds out by itself.
    other = WandbSink(tmp_path, logger=LOGGER, module=StandIn(), resume="auto")
    assert other.state_dict() == {}
    other.open()
    assert other.state_dict() == {"id": "new-id"}


def test_the_settings_of_the_section_arrive(tmp_path):
    wandb = StandIn()
    sink(
        tmp_path,
        wandb,
        config={"seed": 1},
        project="p",
        entity="team",
        group="g",
        run_name="n",
        tags=("a", "b"),
        resume="must",
        run_id="r",
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


def test_without_a_key_the_run_is_offline_and_the_log_says_so(tmp_path, caplog):
    wandb = StandIn(key=False)
    sink(tmp_path, wandb)
    assert [init["mode"] for init in wandb.inits] == ["offline"]
    assert "wandb goes on offline" in caplog.text
    assert "there is no API key" in caplog.text


def test_without_a_server_the_run_is_offline_and_the_log_says_so(tmp_path, caplog):
    wandb = StandIn(offline_only=True)
    sink(tmp_path, wandb, mode="online", run_id="kept")
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"]
    assert wandb.inits[1]["id"] == "kept"
    assert caplog.text.strip().endswith("no such host")


@pytest.mark.parametrize(("mode", "setting"), [("disabled", "online"), (None, "disabled")])
def test_a_mode_that_is_asked_for_needs_no_key(tmp_path, mode, setting):
    wandb = StandIn(key=False, setting=setting)
    sink(tmp_path, wandb, mode=mode)
    assert [init["mode"] for init in wandb.inits] == ["disabled"]


def test_a_wandb_that_raises_does_not_stop_the_run(tmp_path, caplog):
    wandb = StandIn()
    monitor = Monitor([sink(tmp_path, wandb)], LOGGER)
    monitor.write(step_record(1))
    wandb.broken = True
    monitor.write(step_record(2))
    monitor.write(step_record(3))
    assert caplog.text.count("server on fire") == 1
    assert "the monitor 'wandb' failed at step 2 and is off" in caplog.text
    assert wandb.finished
    assert monitor.state_dict() == {"wandb": {"id": wandb.id}}


def test_wandb_that_is_not_installed_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"set wandb\.enabled to false"):
        WandbSink(tmp_path, logger=LOGGER)


OFFLINE = """
import logging, math, sys
from pipemega.monitor import Background, WandbSink
from tests.unit.monitor_records import step_record, timeline_record

assert "wandb" not in sys.modules, "imported before anybody asked for it"
sink = WandbSink(sys.argv[1], logger=logging.getLogger("t"), mode="offline", config={"a": {"b": 1}})
sink = Background(sink)
sink.write(step_record(1, loss=math.nan))
sink.write(step_record(2))
sink.close()
print(sink.state_dict()["id"])
"""


def test_an_offline_run_is_written_under_its_folder_and_ends_without_a_word(tmp_path):
    # In a process of its own: what wandb says at exit is part of the proof, and its service
    # process must not outlive the test.
    pytest.importorskip("wandb")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OFFLINE, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower()
    assert "warning" not in done.stderr.lower()
    run_id = done.stdout.strip()
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    assert file.stat().st_size > 0


STOPPED = """
import logging, os, signal, sys, time
from pipemega.monitor import Background, Monitor, WandbSink
from pipemega.monitor.wandb_sink import _children
from tests.unit.monitor_records import step_record

sink = WandbSink(sys.argv[1], logger=logging.getLogger("t"), mode="offline")
monitor = Monitor([Background(sink, close_seconds=0.5)], logging.getLogger("t"))
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


def test_a_wandb_whose_own_process_hangs_keeps_neither_the_run_nor_its_end_waiting(tmp_path):
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
