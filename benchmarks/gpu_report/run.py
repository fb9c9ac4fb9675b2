"""Runs everything that needs GPUs on this machine, and writes a report that a user can send.

    make gpu                                             all GPUs of this node, at most 40 minutes
    make gpu QUICK=1                                     at most 8 minutes
    make gpu PYTHON=python3                              in an environment that exists
    make gpu PART=tests                                  one part again; the report keeps the others
    python -m benchmarks.gpu_report.run --device cpu     a test of the script, without GPUs

The parts, in this order: `doctor` (all GPUs), `smoke` (one step of a tiny GPT), `benchmark`
(benchmarks/gpu_single), `tests` (tests/gpu). Each has a limit, and the report is written after each
of them. The exit status is 1 if one of them failed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.page import faults, markdown
from benchmarks.gpu_report.results import (
    TestResults,
    describe,
    run_benchmark,
    run_doctor,
    run_smoke,
    run_tests,
)

PARTS = ("doctor", "smoke", "benchmark", "tests")
# Limits of the parts, as shares of the time that is left.
_SHARES = {"doctor": 0.2, "smoke": 0.2, "benchmark": 0.5, "tests": 1.0}
# With fewer minutes than this, the benchmark measures fewer steps.
_MINUTES_OF_ALL_STEPS = 15.0


def main(argv: list[str] | None = None) -> int:
    """Write the report and return the exit status."""
    options = _parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device; to test the script without one: python -m "
            "benchmarks.gpu_report.run --device cpu",
            file=sys.stderr,
        )
        return 2
    stored = options.out.with_suffix(".json")
    results: dict[str, Any] = {part: {"error": "not run"} for part in PARTS}
    if options.part and stored.exists():
        results |= json.loads(stored.read_text(encoding="utf-8"))
    versions, end = describe(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        for part, run in _parts(options, Path(name)).items():
            if options.part in (None, part):
                print(f"{part} ...", file=sys.stderr, flush=True)
                left = max(1.0, _SHARES[part] * (end - time.monotonic()))
                results[part] = _attempt(run, left)
                stored.write_text(json.dumps(results), encoding="utf-8")
                options.out.write_text(_page(versions, results), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))
    print(f"the report is in {options.out}", file=sys.stderr)
    tests = TestResults(**results["tests"])
    return 1 if faults(tests, results["benchmark"], results["doctor"], results["smoke"]) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_report.md"), help="the report")
    parser.add_argument(
        "--part", choices=PARTS, help="run only this part, and keep the results of the others"
    )
    parser.add_argument(
        "--micro-batch", type=int, help="samples per micro-batch of the benchmark (default: 8)"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="limit of the whole run (default: 40)"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="test processes, with pytest-xdist (default: one)"
    )
    return parser.parse_args(argv)


def _parts(
    options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[float], dict[str, Any]]]:
    """Return the function of each part, which takes its limit in seconds."""
    device = options.device
    size = [] if options.micro_batch is None else ["--micro-batch", str(options.micro_batch)]
    if options.minutes < _MINUTES_OF_ALL_STEPS:
        size += ["--steps", "4", "--warmup", "2"]
    return {
        "doctor": lambda limit: run_doctor(device, folder, limit),
        "smoke": lambda limit: run_smoke(device, folder, limit),
        "benchmark": lambda limit: run_benchmark(device, folder, size, limit),
        "tests": lambda limit: asdict(run_tests(device, folder, limit, options.workers)),
    }


def _attempt(run: Callable[[float], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return the results, or the error: the next part runs all the same."""
    try:
        return run(limit)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _page(versions: dict[str, str], results: dict[str, Any]) -> str:
    tests = TestResults(**results["tests"])
    return markdown(versions, tests, results["benchmark"], results["doctor"], results["smoke"])


if __name__ == "__main__":
    raise SystemExit(main())
