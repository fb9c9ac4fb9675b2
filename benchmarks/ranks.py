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
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


class Failed(RuntimeError):
    """A process of a measurement failed; the message is the output of all processes."""


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
            with logs[rank].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=_environment(rank, num_ranks, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes)
        if any(process.returncode for process in processes):
            outputs = [f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs)]
            raise Failed("\n".join([" ".join([module, *arguments]), *outputs]))
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
