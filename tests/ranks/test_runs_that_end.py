"""Real runs under torchrun that are killed, stopped and started again, as a cluster does it."""

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

from tests.ranks import long_run
from tests.ranks.pool import RankPool
from tests.ranks.test_scripts_that_fail import Scripts, _environment, _port

# The model and the data of long_run.py; {befalls} runs on each rank before each step.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import pipemega
from pipemega.training import Trainer
from tests.ranks import long_run

class Watched(Trainer):
    def train_step(self):
        rank, step = self.engine.mesh.rank, self.engine.global_steps + 1
        {befalls}
        return super().train_step()

with pipemega.run():
    trainer = Watched(long_run.build(json.loads(Path(sys.argv[1]).read_text())))
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
        """Why and after which step `fit` ended, as rank 0 says."""
        return list(json.loads(re.findall(r"^ended: (.*)", self.out, re.MULTILINE)[-1]))


class Runs(Scripts):
    """Runs SCRIPT on two ranks under torchrun, or as one process."""

    def start(
        self,
        settings: dict[str, Any],
        befalls: str = "pass",
        options: tuple[str, ...] = (),
        launched: bool = True,
    ) -> "subprocess.Popen[str]":
        script, config = self._folder / "script.py", self._folder / "config.json"
        script.write_text(SCRIPT.format(befalls=befalls))
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
    return long_run.config(
        str(folder),
        mesh={"pipeline": 2, "device": "cpu", "timeout_seconds": 60},
        training={"resume": "auto"},
        **changes,
    )


def losses_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def test_a_killed_rank_is_started_again_by_torchrun_and_the_run_goes_on_bit_for_bit(
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
    # Of rank 0, in the first life: no wish of anybody's that the run should end.
    assert "no sign of life from rank 1: killed" in ended.errors
    assert "killed has global_step3, so the run goes on from there" in ended.errors
    assert re.search(r"done with step 8 of 8, 5 of them in this process: .*resumed 1", ended.errors)
    (whole, _) = pool.run(2, long_run.fit, settings_in(tmp_path / "whole"))
    assert losses_of(tmp_path / "killed") == whole["losses"]
    again = long_run.config(
        str(tmp_path / "killed"), mesh={"pipeline": 2}, training={"resume": "auto"}
    )
    (resumed, _) = pool.run(2, long_run.fit, again)
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
    # What torchrun itself says of the signal comes after; of the ranks none has failed.
    assert "error: rank" not in ended.errors


@pytest.mark.parametrize(
    ("signals", "code", "words"),
    [
        (["SIGINT"], 0, "stopped (SIGINT) after step 2 of 8"),
        (["SIGUSR1", "SIGTERM"], 143, "rank 0: SIGTERM after SIGUSR1: ended at once"),
    ],
    ids=["Ctrl-C", "twice"],
)
def test_one_process_ends_in_order_at_the_first_signal_and_at_once_at_the_second(
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
