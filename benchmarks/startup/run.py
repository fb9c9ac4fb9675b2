"""Seconds from `torchrun` to the first step of the quickstart, and of `pipemega check`.

    git worktree add ../old 2371ce9
    python -m benchmarks.startup.run --baseline ../old     from the root of the repository

Four ranks with gloo, as `make train` starts them, with the text corpus and the bytecode in their
caches. The trees alternate. Each runs its own configs/quickstart.json; this tree also runs it with
the evaluation before the first step, which the quickstart of 2371ce9 has. `floor.py`, started the
same way, is the lower bound: torch, the same groups, the same model and its first step.
A tree is imported from its path, so that one Python with the libraries is enough.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks import ROOT, machine

RANKS = 4
TARGET = 0.6
EVALUATED = ("training.eval_on_start=true",)
# What rank 0 prints, and the part that ends with it.
LINES = {
    "[pipemega] INFO: run folder": "groups, data, model",
    "validation step 0 ": "first evaluation",
    "step 1/": "first step",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, help="root of another tree, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check-rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args(argv)
    trees = {"this": ROOT} | ({"baseline": options.baseline.resolve()} if options.baseline else {})
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, tuple[Path, str, Sequence[str]]] = {
            name: (tree, "worker.py", ()) for name, tree in trees.items()
        }
        runs["this, with evaluation"] = (ROOT, "worker.py", EVALUATED)
        runs["floor"] = (ROOT, "floor.py", ())
        runs["floor, with evaluation"] = (ROOT, "floor.py", EVALUATED)
        for run in runs.values():  # fills the caches
            first_step(*run, folder)
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                starts[name].append(first_step(*run, folder))
        checks: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(options.check_rounds):
            for name, tree in trees.items():
                checks[name].append(check(tree))
    report = {"machine": about, "start": starts, "check": checks}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines_of(report)))
    return 0


def first_step(tree: Path, script: str, changes: Sequence[str], folder: str) -> dict[str, float]:
    """Start the quickstart of `tree`; return the seconds of each part until its first step."""
    config = tree / "configs" / "quickstart.json"
    command = [*_torchrun(), str(Path(__file__).with_name(script)), str(tree)]
    for change in ("steps_per_print=1", *changes):
        command += ["--set", change]
    command += ["--config", str(config)]
    started, parts, last = time.time(), dict[str, float](), 0.0
    process = subprocess.Popen(
        command,
        cwd=tempfile.mkdtemp(dir=folder),
        env=_environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            now = time.time() - started
            if line.startswith("@@ "):
                _, name, at = line.split("|")
                last, parts[name] = float(at) - started, float(at) - started - last
                continue
            found = next((LINES[start] for start in LINES if line.startswith(start)), None)
            if found is not None:
                last, parts[found] = now, now - last
            if found == "first step":
                return {**parts, "total": now}
    finally:
        _end(process)
    raise RuntimeError(f"{tree}: no first step\n" + "".join(printed[-30:]))


def check(tree: Path) -> dict[str, float]:
    """Return the seconds, and the seconds of processor time, of `pipemega check`."""
    before, started = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pipemega", "check", "configs/quickstart.json"],
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {"seconds": time.perf_counter() - started, "cpu": cpu}


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Return the tables, and a line for each mark."""
    about, starts = report["machine"], report["start"]
    yield (
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, Python "
        f"{about['python']}; load {about['load_before']:.1f} before; medians."
    )
    names = ["torchrun starts the worker", "imports", *LINES.values(), "total"]
    yield "| seconds of rank 0 | " + " | ".join(starts) + " |"
    yield "| --- |" + " ---: |" * len(starts)
    for part in names:
        cells = (median(one.get(part, 0.0) for one in rounds) for rounds in starts.values())
        yield f"| {part} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"
    checks = report["check"]
    yield "\n| seconds | " + " | ".join(checks) + " |"
    yield "| --- |" + " ---: |" * len(checks)
    for kind in ("seconds", "cpu"):
        cells = (median(one[kind] for one in rounds) for rounds in checks.values())
        label = "pipemega check" + (", CPU time" if kind == "cpu" else "")
        yield f"| {label} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"
    for name, floor in (("this", "floor"), ("this, with evaluation", "floor, with evaluation")):
        pairs = zip(starts[name], starts[floor], strict=True)
        own = median(one["total"] - other["total"] for one, other in pairs)
        yield f"\n{name}: {own:.2f} s more than {floor}"
    if "baseline" not in starts:
        return
    for name in ("this, with evaluation", "floor", "floor, with evaluation"):
        yield f"\n{name}: {_ratio(starts, 'total', name):.2f} x the baseline"
    ratio = _ratio(starts, "total")
    yield f"\nfirst step: {ratio:.2f} x the baseline; target {TARGET}: {_verdict(ratio <= TARGET)}"
    ratio = _ratio(checks, "cpu")
    yield f"pipemega check: {ratio:.2f} x the baseline; target 1: {_verdict(ratio <= 1.03)}"


def _ratio(rounds: Mapping[str, list[dict[str, float]]], key: str, name: str = "this") -> float:
    """Return the median of the ratios of the rounds."""
    pairs = zip(rounds[name], rounds["baseline"], strict=True)
    return median(mine[key] / other[key] for mine, other in pairs)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _torchrun() -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={RANKS}",
    ]


def _environment(tree: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    raise SystemExit(main())
