"""Runs everything that needs GPUs on this machine, and writes a report that a user can send.

    make gpu                                             all GPUs of this node, at most 40 minutes
    python -m benchmarks.gpu_report.run --minutes 8      at most 8 minutes
    python -m benchmarks.gpu_report.run --device cpu     a test of the script, without GPUs

Runs `pipemega doctor` on all GPUs, the benchmark in benchmarks/gpu_single, and the tests in
tests/gpu. The report is written after each part. The exit status is 1 if one of them failed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_report.page import faults, markdown
from benchmarks.gpu_report.results import (
    TestResults,
    describe,
    run_benchmark,
    run_doctor,
    run_tests,
)

# Limits of the parts, as shares of the time that is left.
_SHARE_OF_DOCTOR, _SHARE_OF_BENCHMARK = 0.2, 0.5
# With fewer minutes than this, the benchmark measures fewer steps.
_MINUTES_OF_ALL_STEPS = 15.0


def main(argv: list[str] | None = None) -> int:
    """Write the report and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_report.md"), help="the report")
    parser.add_argument(
        "--micro-batch", type=int, help="samples per micro-batch of the benchmark (default: 8)"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="limit of the whole run (default: 40)"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="test processes, with pytest-xdist (default: one)"
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device; to test the script without one: python -m "
            "benchmarks.gpu_report.run --device cpu",
            file=sys.stderr,
        )
        return 2
    end = time.monotonic() + 60 * options.minutes
    size = [] if options.micro_batch is None else ["--micro-batch", str(options.micro_batch)]
    if options.minutes < _MINUTES_OF_ALL_STEPS:
        size += ["--steps", "4", "--warmup", "2"]
    versions = describe()
    tests, benchmark, doctor = TestResults(error="not run"), *({"error": "not run"},) * 2

    def left(share: float = 1.0) -> float:
        return max(1.0, share * (end - time.monotonic()))

    def write() -> None:
        page = markdown(versions, tests, benchmark, doctor)
        options.out.write_text(page, encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doctor = run_doctor(options.device, folder, left(_SHARE_OF_DOCTOR))
        write()
        benchmark = run_benchmark(options.device, folder, size, left(_SHARE_OF_BENCHMARK))
        write()
        tests = run_tests(options.device, folder, left(), options.workers)
        write()
    print(options.out.read_text(encoding="utf-8"))
    print(f"the report is in {options.out}", file=sys.stderr)
    return 1 if faults(tests, benchmark, doctor) else 0


if __name__ == "__main__":
    raise SystemExit(main())
