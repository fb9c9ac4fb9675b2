"""Runs the parts of the report: `pipemega doctor`, one step, the benchmark, and the tests.

Each part has a limit in seconds. What it has measured until then is in the report.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from pipemega.lazy_imports import __version__

ROOT = Path(__file__).parents[2]
# The ranks of `pipemega doctor` where there is no GPU.
_CPU_RANKS = 2
# pytest writes its results after SIGINT.
_SECONDS_AFTER_INTERRUPT = 20.0


@dataclass(frozen=True)
class TestResults:
    """The outcome of pytest.

    Args:
        failed: name of the test -> first line of the error.
        skipped: reason -> number of tests.
        error: why results are missing; empty if none are.
    """

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    error: str = ""

    # pytest must not take this class for tests.
    __test__ = False


def read_junit(text: str) -> TestResults:
    """Return the results in a file that pytest has written with --junitxml."""
    passed, failed, skipped = 0, {}, Counter[str]()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.gpu.")
        problem = next((p for p in case if p.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            failed[name] = (problem.get("message") or "no message").splitlines()[0]
        elif skip is not None:
            skipped[(skip.get("message") or "no reason").splitlines()[0]] += 1
        else:
            passed += 1
    return TestResults(passed, failed, dict(skipped))


def run_tests(device: str, folder: Path, limit: float, workers: int = 0) -> TestResults:
    """Run tests/gpu; without GPUs only the tests on CPU ranks that are in the default run.

    Args:
        workers: number of test processes of pytest-xdist; 0 runs the tests in pytest's process.
    """
    junit = folder / "tests.xml"
    marker = "gpu" if device == "cuda" else "not gpu and not sweep"
    words = ["-m", "pytest", "tests/gpu", "-m", marker, "-v", f"--junitxml={junit}"]
    if workers:
        # pytest-benchmark warns about test processes, and warnings are errors here.
        words += ["-n", str(workers), "--dist", "worksteal", "-p", "no:benchmark"]
    ended = _run(words, limit)
    if not junit.exists():
        return TestResults(error=f"pytest {ended}")
    results = read_junit(junit.read_text(encoding="utf-8"))
    # 0 and 1: all tests have run.
    return results if ended.code in (0, 1) else replace(results, error=f"pytest {ended}")


def run_benchmark(
    device: str, folder: Path, options: Sequence[str], limit: float
) -> dict[str, Any]:
    """Run benchmarks/gpu_single; return its JSON values, or {"error": ...}."""
    path = folder / "benchmark.json"
    small = () if device == "cuda" else ("--device", "cpu", "--tiny", "--steps", "2")
    command = ["-m", "benchmarks.gpu_single.run", *small, *options, "--json", str(path)]
    ended = _run(command, limit)
    if not path.exists():
        return {"error": f"the benchmark {ended}"}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if ended.code not in (0, 1):
        values["faults"] = [*values["faults"], f"the benchmark {ended}"]
    return values


def run_smoke(device: str, folder: Path, limit: float) -> dict[str, Any]:
    """Run one step of a tiny GPT; return its loss and its seconds, or {"error": ...}."""
    path = folder / "smoke.json"
    words = ["--device", device, "--tiny", "--steps", "1", "--warmup", "0", "--no-items"]
    command = [
        "-m",
        "benchmarks.gpu_single.run",
        *words,
        "--recompute",
        "none",
        "--json",
        str(path),
    ]
    ended = _run(command, limit)
    if not path.exists():
        return {"error": f"one step {ended}"}
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    if row["error"]:
        return {"error": row["error"]}
    return {"loss": row["losses"][0], "seconds": row["step_seconds"]}


def run_doctor(device: str, folder: Path, limit: float) -> dict[str, Any]:
    """Run `pipemega doctor` on all GPUs of this node; return its JSON values."""
    ranks = torch.cuda.device_count() if device == "cuda" else _CPU_RANKS
    path = folder / "doctor.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with path.open("w", encoding="utf-8") as file:
        ended = _run([*launcher, "-m", "pipemega", "doctor", "--json"], limit, stdout=file)
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {"error": f"pipemega doctor {ended}"}
    return values


def describe() -> dict[str, str]:
    """Return the commit and the versions."""
    nccl = "none"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    return {
        "pipemega": __version__,
        "commit": _commit(),
        "GPUs": gpus or "none",
        "NCCL": nccl,
    }


def _commit() -> str:
    """Return the commit of the working tree, and if files differ from it."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}, with local changes" if changes else commit


@dataclass(frozen=True)
class _Ended:
    """How a process has ended: its exit code, or None after its limit in seconds."""

    code: int | None
    limit: float

    def __str__(self) -> str:
        if self.code is None:
            return f"was stopped after its limit of {self.limit:.0f} s"
        return f"ended with exit code {self.code}"


def _run(words: Sequence[str], limit: float, stdout: Any = sys.stderr) -> _Ended:
    """Run Python in the root of the repository, with all other output on stderr."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=stdout, start_new_session=True
    )
    try:
        return _Ended(process.wait(limit), limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_AFTER_INTERRUPT)
        return _Ended(None, limit)
    finally:
        # Also the ranks of a launcher that did not end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
