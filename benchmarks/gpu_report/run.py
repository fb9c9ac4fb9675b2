"""Runs everything that needs GPUs on this machine, and writes a report that a user can send.

    make gpu                                             all GPUs of this node
    python -m benchmarks.gpu_report.run --device cpu     a test of the script, without GPUs

Runs `pipemega doctor` on all GPUs, the tests in tests/gpu, and the benchmark in
benchmarks/gpu_single. The exit status is 1 if one of them failed; the report is written anyway.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_report.page import faults, markdown
from benchmarks.gpu_report.results import describe, run_benchmark, run_doctor, run_tests


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
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device; to test the script without one: python -m "
            "benchmarks.gpu_report.run --device cpu",
            file=sys.stderr,
        )
        return 2
    size = () if options.micro_batch is None else ("--micro-batch", str(options.micro_batch))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doctor = run_doctor(options.device, folder)
        tests = run_tests(options.device, folder)
        benchmark = run_benchmark(options.device, folder, size)
    page = markdown(describe(), tests, benchmark, doctor)
    options.out.write_text(page, encoding="utf-8")
    print(page)
    print(f"the report is in {options.out}", file=sys.stderr)
    return 1 if faults(tests, benchmark, doctor) else 0


if __name__ == "__main__":
    raise SystemExit(main())
