"""Runs under torchrun that are killed, preempted and restarted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks.fault_tolerance.test_failing_scripts import Scripts, _environment, _port
from tests.ranks.pool import RankPool
from tests.ranks.training import long_runs
from tests.sampling import some_cases

# The model and the data of long_runs.py; {event} runs on each rank before each step.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import pipemega
from pipemega.training import Trainer
from tests.ranks.training import long_runs

class EventTrainer(Trainer):
    def train_step(self):
        rank, step = self.engine.mesh.rank, self.engine.global_steps + 1
        {event}
        return super().train_step()

with pipemega.run():
    trainer = EventTrainer(long_runs.build(json.loads(Path(sys.argv[1]).read_text())))
    trainer.fit()
    if trainer.engine.mesh.rank == 0:
        print("ended:", json.dumps([trainer.stopped, trainer.engine.global_steps]), flush=True)
"""


class Ended(NamedTuple):
    code: int
    out: str
    errors: str

    @property
    def told(self) -> list[Any]:
        """Why and after which step `fit` ended, from the log of rank 0."""
        return list(json.loads(re.findall(r"^ended: (.*)", self.out, re.MULTILINE)[-1]))


class Runs(Scripts):
    """Runs SCRIPT on two ranks under torchrun, or as one process."""

    def start(
        self,
        settings: dict[str, Any],
        event: str = "pass",
        options: tuple[str, ...] = (),
        launched: bool = True,
    ) -> "subprocess.Popen[str]":
        script, config = self._folder / "script.py", self._folder / "config.json"
        script.write_text(SCRIPT.format(event=event))
        config.write_text(json.dumps(settings))
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={_port()}"]
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if launched else ()),
                *options,
                str(script),
                str(config),
                self._token,
            ],
            env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self, run: "subprocess.Popen[str]") -> Ended:
        out, errors = run.communicate(timeout=180)
        return Ended(run.returncode, out, errors)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    left = runs.left()
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes that did not end"


def settings_in(folder: Path, **changes: Any) -> dict[str, Any]:
    return long_runs.config(
        str(folder),
        mesh={"pipeline": 2, "device": "cpu", "timeout_seconds": 60},
        training={"resume": "auto"},
        **changes,
    )


def losses_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


@pytest.mark.sweep
def test_torchrun_restarts_after_a_kill_and_the_run_resumes_bitwise_equal(
    pool: RankPool, runs: Runs, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    ended = runs.end(
        runs.start(
            settings_in(tmp_path / "killed"),
            f'''if rank == 1 and step == 6 and not os.path.exists("{died}"):
            open("{died}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)''',
            ("--max-restarts=1",),
        )
    )
    assert ended.code == 0, ended.errors
    assert died.exists()
    assert ended.told == ["", 8]
    # By rank 0 before the restart: torchrun's SIGTERM is not taken for a stop request.
    assert re.search(
        r"error: rank 1 \(pid .*\) disappeared in step 6; newest checkpoint: global_step3; "
        r"torchrun starts the ranks again \(restart 1 of 1\); details of every rank: \S+\.log\n",
        ended.errors,
    )
    assert re.search(r"resuming from global_step3 in \S*killed\n", ended.errors)
    assert re.search(r"finished step 8 of 8, 5 of them in this process: .*resumed 1", ended.errors)
    (whole, _) = pool.run(2, long_runs.fit, settings_in(tmp_path / "whole"))
    assert losses_of(tmp_path / "killed") == whole["losses"]
    again = long_runs.config(
        str(tmp_path / "killed"), mesh={"pipeline": 2}, training={"resume": "auto"}
    )
    (resumed, _) = pool.run(2, long_runs.fit, again)
    for name, value in whole["parameters"].items():
        assert (resumed["parameters"][name] == value).all(), name


def test_sigterm_to_torchrun_ends_all_ranks_with_a_checkpoint_and_exit_code_0(
    runs: Runs, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    run = runs.start(
        settings_in(tmp_path / "run"),
        f'''open("{began}" + str(rank), "w").close()
        time.sleep(0.5)''',
    )
    for rank in range(2):
        wait_for(tmp_path / f"began{rank}")
    run.send_signal(signal.SIGTERM)
    ended = runs.end(run)
    reason, steps = ended.told
    assert reason == "SIGTERM on all ranks"
    assert 0 < steps < 8
    assert (tmp_path / f"run/global_step{steps}").is_dir()
    assert f"stopped (SIGTERM on all ranks) after step {steps} of 8" in ended.errors
    # torchrun's own message about the signal follows; no rank has failed.
    assert "error: rank" not in ended.errors


@pytest.mark.parametrize(
    ("signals", "code", "words"),
    some_cases(
        [
            (["SIGINT"], 0, "stopped (SIGINT) after step 2 of 8"),
            (["SIGUSR1", "SIGTERM"], 143, "rank 0: SIGTERM after SIGUSR1: exiting at once"),
        ],
        1,
    ),
    ids=["Ctrl-C", "twice"],
)
def test_one_process_saves_after_the_first_signal_and_exits_at_the_second(
    runs: Runs, tmp_path: Path, signals: list[str], code: int, words: str
) -> None:
    strikes = "; ".join(f"os.kill(os.getpid(), signal.{name})" for name in signals)
    settings = {**settings_in(tmp_path / "run"), "mesh": {"device": "cpu"}}
    ended = runs.end(runs.start(settings, f"if step == 2: {strikes}", launched=False))
    assert ended.code == code, ended.errors
    assert words in ended.errors
    assert (tmp_path / "run/global_step2").is_dir() == (code == 0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.05)
