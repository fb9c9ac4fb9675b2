"""Runs the checks of a machine with GPUs: `pipemega doctor`, the tests, and the benchmark."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from pipemega.startup.version import __version__

ROOT = Path(__file__).parents[2]
# The ranks of `pipemega doctor` where there is no GPU.
_CPU_RANKS = 2


@dataclass(frozen=True)
class TestResults:
    """The outcome of pytest.

    Args:
        failed: name of the test -> first line of the error.
        skipped: reason -> number of tests.
        error: why there are no results; empty if there are.
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


def run_tests(device: str, folder: Path) -> TestResults:
    """Run tests/gpu; without GPUs only the tests on CPU ranks that are in the default run."""
    junit = folder / "tests.xml"
    marker = "gpu" if device == "cuda" else "not gpu and not sweep"
    code = _run(["-m", "pytest", "tests/gpu", "-m", marker, "-q", f"--junitxml={junit}"])
    if not junit.exists():
        return TestResults(error=f"pytest ended with exit code {code}")
    return read_junit(junit.read_text(encoding="utf-8"))


def run_benchmark(device: str, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run benchmarks/gpu_single; return its JSON values, or {"error": ...}."""
    path = folder / "benchmark.json"
    small = () if device == "cuda" else ("--device", "cpu", "--tiny", "--steps", "2")
    command = ["-m", "benchmarks.gpu_single.run", *small, *options, "--json", str(path)]
    code = _run(command)
    if not path.exists():
        return {"error": f"the benchmark ended with exit code {code}"}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def run_doctor(device: str, folder: Path) -> dict[str, Any]:
    """Run `pipemega doctor` on all GPUs of this node; return its JSON values."""
    ranks = torch.cuda.device_count() if device == "cuda" else _CPU_RANKS
    path = folder / "doctor.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with path.open("w", encoding="utf-8") as file:
        code = _run([*launcher, "-m", "pipemega", "doctor", "--json"], stdout=file)
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {"error": f"pipemega doctor ended with exit code {code}"}
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


def _run(words: Sequence[str], stdout: Any = sys.stderr) -> int:
    """Run Python in the root of the repository, with all other output on stderr."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, stdout=stdout, check=False).returncode
