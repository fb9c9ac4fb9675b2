"""Runs one measurement on several ranks: new processes with one thread each, connected by gloo."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


# Seconds; a turn takes a few seconds, building a model and its first steps up to a minute.
TURN_TIMEOUT = 600.0


class Failed(RuntimeError):
    """A process of a measurement failed; the message is the output of all processes."""


class Ranks:
    """Processes that stay alive and work only when it is their turn.

    Each rank runs `python -m module arguments --turns FD`. FD is a socket: the process writes a
    line of JSON when it is ready and after each turn, and reads an empty line as the order to work.
    So several groups of ranks can be alive at the same time and take turns on the same cores.
    """

    def __init__(
        self, module: str, num_ranks: int, arguments: Sequence[str], python: str | None = None
    ) -> None:
        self._words = [module, *arguments]
        self._resources = ExitStack()
        folder = self._resources.enter_context(tempfile.TemporaryDirectory())
        self._logs = [Path(folder, f"{rank}.log") for rank in range(num_ranks)]
        self._lines = []
        port = _free_port()
        for rank in range(num_ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(TURN_TIMEOUT)
            with theirs:
                process = _start(
                    [python or sys.executable, "-m", *self._words, "--turns", str(theirs.fileno())],
                    _environment(rank, num_ranks, port),
                    self._logs[rank],
                    theirs.fileno(),
                )
            self._resources.callback(process.wait)
            self._resources.callback(process.kill)
            self._lines.append(self._resources.enter_context(ours.makefile("rw")))
            ours.close()

    def ready(self) -> list[dict[str, Any]]:
        """Wait until all ranks are ready or have finished their turn; return the JSON of each.

        Raises:
            Failed: a process ended or took longer than `TURN_TIMEOUT`.
        """
        try:
            return [json.loads(lines.readline()) for lines in self._lines]
        except (OSError, ValueError) as error:
            time.sleep(2.0)  # for the error output of the other ranks
            raise _failed(self._words, self._logs) from error

    def turn(self) -> list[dict[str, Any]]:
        """Let all ranks work for one turn and return the JSON of each.  Raises: Failed."""
        for lines in self._lines:
            lines.write("\n")
            lines.flush()
        return self.ready()

    def close(self) -> None:
        """End all processes."""
        self._resources.close()


def measure(
    module: str, num_ranks: int, arguments: Sequence[str], python: str | None = None
) -> list[dict[str, Any]]:
    """Run `python -m module arguments --out FILE` on every rank and return the JSON of each rank.

    Args:
        python: path of another interpreter.

    Raises:
        Failed: a rank failed; the others were killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        files = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        logs = [Path(folder, f"{rank}.log") for rank in range(num_ranks)]
        processes = []
        for rank in range(num_ranks):
            command = [python or sys.executable, "-m", module, *arguments]
            command += ["--out", str(files[rank])]
            processes.append(_start(command, _environment(rank, num_ranks, port), logs[rank]))
        _wait(processes)
        if any(process.returncode for process in processes):
            raise _failed([module, *arguments], logs)
        return [json.loads(file.read_text()) for file in files]


def machine() -> dict[str, Any]:
    """Return processor, number of cores, versions, and the load of the machine before the run."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def _start(
    command: Sequence[str], environment: dict[str, str], log: Path, *fds: int
) -> subprocess.Popen[bytes]:
    """Start a process in the root of the repository; its output goes to `log`."""
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
        )


def _failed(words: Sequence[str], logs: Sequence[Path]) -> Failed:
    outputs = [f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs)]
    return Failed("\n".join([" ".join(words), *outputs]))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes; after the first failure, kill the others."""
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                time.sleep(2.0)  # for the error output of the other ranks
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
