"""`pipemega doctor` in one process, and where a rank or rank 0 does not come."""

import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.doctor.attendance import AbsentRanks, Attendance, Outcome
from pipemega.doctor.examination import Examination, Options

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*_VARIABLES, "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        # First set, so that what the command sets is removed after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> int:
    port = _free_port()
    values = (rank, world_size, 0, "127.0.0.1", port)
    for name, value in zip(_VARIABLES, values, strict=True):
        monkeypatch.setenv(name, str(value))
    return port


def _free_port() -> int:
    while True:
        # Below the range from which the system takes ports.
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def test_one_process_is_checked_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    status = {check["check"]: check["status"] for check in result["checks"]}
    assert result["ok"]
    assert {status[name] for name in ("launch", "ranks", "nodes", "versions")} == {"ok"}
    assert status["connections"] == "skipped"
    (disk,) = result["measured"]["disk"].values()
    assert disk["free"] > 0
    assert status["disk"] == "ok"
    assert "doctor: waiting for all ranks ..." in printed.err


def test_the_predicted_memory_of_a_config_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
    config = {
        "train_batch_size": 2,
        "mesh": {"device": "cpu"},
        "model": {**model, "vocab_size": 64},
        "optimizer": {"type": "AdamW"},
    }
    Path("ds.json").write_text(json.dumps(config))
    save = f"checkpoint.save={tmp_path}/run"
    assert main(["doctor", "--config", "ds.json", "--set", save]) == 0
    out = capsys.readouterr().out
    assert "config       mesh pipeline 1 x data 1 x tensor 1" in out
    assert "pipemega plan predicts" in out
    assert f"disk         {tmp_path}: written by all nodes, " in out
    assert "a checkpoint has about" in out


def test_a_config_that_cannot_run_has_failed_and_the_rest_is_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("ds.json").write_text('{"train_batch_size": 2, "mesh": {"pipeline": 2}}')
    assert main(["doctor", "--config", "ds.json"]) == 1
    out = capsys.readouterr().out
    assert "1 rank was started, and one copy of the model takes" in out
    assert "ok       versions" in out
    assert "1 failed: repair the failed checks first" in out


def test_a_rank_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, rank=0, world_size=4)
    assert main(["doctor", "--timeout", "0.5"]) == 1
    out = capsys.readouterr().out
    assert (
        f"ranks 1-3 of 4 did not connect within 0.5 s; connected: ranks on {socket.gethostname()}"
        in out
    )
    assert "remedy: start them, and check that they reach MASTER_ADDR and MASTER_PORT" in out


def test_a_rank_without_rank_0_names_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = launched(monkeypatch, rank=1, world_size=4)
    assert main(["doctor", "--timeout", "0.3"]) == 1
    out = capsys.readouterr().out
    assert f"rank 1: no store at 127.0.0.1:{port} within 0.3 s (Connection refused)" in out


def test_a_folder_without_rights_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/shared/run")

    monkeypatch.setattr("pipemega.doctor.measurements.place_marker", refuse)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "disk         rank 0: [Errno 13] Permission denied: '/shared/run'" in out
    assert "remedy: choose a folder that all nodes share and can write (checkpoint.save)" in out


def test_a_missing_variable_of_the_launcher_ends_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 1
    assert "failed   launch  RANK, MASTER_ADDR, MASTER_PORT not set" in capsys.readouterr().out


def test_a_rank_that_cannot_read_its_facts_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: object) -> None:
        raise RuntimeError("CUDA error: the device is lost")

    monkeypatch.setattr("pipemega.doctor.examination.read_facts", broken)
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
    config = {"train_batch_size": 2, "model": {**model, "vocab_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["doctor", "--config", "config.json"]) == 1
    assert "rank 0: CUDA error: the device is lost" in capsys.readouterr().out


def test_a_rank_that_is_lost_while_the_folder_is_checked_leaves_no_file(tmp_path: Path) -> None:
    class LosesRanks(Attendance):
        def run(self, topic: str, step: Callable[[], Any]) -> dict[int, Outcome]:
            if topic == "disk files":
                assert list(tmp_path.iterdir())
                raise AbsentRanks(topic, (1,), self.seconds)
            return super().run(topic, step)

    options = Options(folder=str(tmp_path), quiet=True)
    examination = Examination(LosesRanks(None, 0, 1, 30.0), options)
    examination.run()
    assert examination.findings[-1].status == "failed"
    assert not list(tmp_path.iterdir())
