"""Run the tests of what depends on torch with several versions of torch: `make versions`.

    python tests/versions.py 2.8.0 2.11.0@python3.10 newest -n 2

Each version has an environment in build/versions, with the Python after `@`, else that of this
script. "newest" is the newest that setup.py allows. Other arguments are those of pytest. On Linux
torch brings the libraries of CUDA, about 5 GB for each version.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"

# Not tests/*/hf: Hugging Face models depend on transformers, for which there is `make hf`.
PART = [
    "tests/paper/test_imports.py",
    "tests/unit/checkpoint",
    "tests/unit/diagnostics",
    "tests/unit/distributed",
    "tests/unit/engine",
    "tests/unit/fault_tolerance",
    "tests/unit/models",
    "tests/unit/optimizer",
    "tests/unit/pipeline",
    "tests/unit/planning/test_planning.py",
    "tests/unit/tensor_parallel",
    "tests/ranks/checkpoint",
    "tests/ranks/distributed",
    "tests/ranks/engine",
    "tests/ranks/nccl_like",
    "tests/ranks/optimizer",
    "tests/ranks/pipeline",
    "tests/ranks/profiling",
    "tests/ranks/tensor_parallel",
]


class Result(NamedTuple):
    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    minutes: float


def environment(torch: str, python: str) -> Path:
    """Return the Python of the environment for this version of torch; create it if needed."""
    folder = FOLDER / f"torch-{torch}-{Path(python).name}"
    interpreter, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"creating {folder}", flush=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints = FOLDER / "constraints.txt"
        constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        install = [interpreter, "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run([*install, "setuptools>=64", "wheel"], check=True)
        install += ["--constraint", constraints, wanted, "--editable", ".[dev]"]
        subprocess.run(install, check=True, cwd=ROOT)
        ready.touch()
    return interpreter


def run(torch: str, python: str, options: list[str]) -> Result:
    interpreter = environment(torch, python)
    report = FOLDER / f"{interpreter.parents[1].name}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    subprocess.run(
        [interpreter, "-m", "pytest", *options, f"--junitxml={report}", *PART],
        cwd=ROOT,
        check=False,
    )
    minutes = (time.monotonic() - started) / 60
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    facts = "import torch, platform; print(torch.__version__, platform.python_version())"
    found = subprocess.check_output([interpreter, "-c", facts], text=True).split()
    passed = count["tests"] - failed - count["skipped"]
    return Result(*found, passed, failed, count["skipped"], minutes)


def main(arguments: list[str]) -> int:
    wanted = [a for a in arguments if re.match(r"newest|\d+\.", a)]
    options = [a for a in arguments if a not in wanted]
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = []
    for name in wanted:
        torch, _, python = name.partition("@")
        results.append(run(torch, python or sys.executable, options))
    print(f"\n{'torch':14} {'Python':8} {'passed':>7} {'failed':>7} {'skipped':>8} {'minutes':>8}")
    for result in results:
        print("{:14} {:8} {:7} {:7} {:8} {:8.1f}".format(*result))
    return any(result.failed or not result.passed for result in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
