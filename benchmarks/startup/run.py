"""Seconds from `torchrun` to the first step of the quickstart, and of `pipemega check`.

    git worktree add ../old 2371ce9
    python -m benchmarks.startup.run --baseline ../old     from the root of the repository

Four ranks with gloo, as `make train` starts them, with the text corpus in the cache. The trees
alternate; one `torchrun` whose workers only import torch is the lower bound of both.
A tree is imported from its path, so that one Python with the libraries is enough.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks import ROOT, machine

RANKS = 4
TARGET = 0.6
# What rank 0 prints, and the part that ends with it.
LINES = {"validation step 0 ": "first evaluation", "step 1/": "first step"}


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
        for tree in trees.values():  # fills the caches
            first_step(tree, folder)
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        bare = []
        for _ in range(options.rounds):
            bare.append(torchrun_alone(folder))
            for name, tree in trees.items():
                starts[name].append(first_step(tree, folder))
        checks: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(options.check_rounds):
            for name, tree in trees.items():
                checks[name].append(check(tree))
    report = {"machine": about, "bare": bare, "start": starts, "check": checks}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines_of(report)))
    return 0


def first_step(tree: Path, folder: str) -> dict[str, float]:
    """Start the quickstart of `tree`; return the seconds of each part until its first step."""
    config = tree / "configs" / "quickstart.json"
    command = [*_torchrun(), str(Path(__file__).with_name("worker.py")), str(tree)]
    command += ["--config", str(config), "--set", "steps_per_print=1"]
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


def torchrun_alone(folder: str) -> float:
    """Return the seconds of a torchrun whose workers import torch and end."""
    script = Path(folder, "only_torch.py")
    script.write_text("import torch\n")
    started = time.time()
    subprocess.run([*_torchrun(), str(script)], check=True, env=_environment(ROOT), cwd=folder)
    return time.time() - started


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
    yield f"\ntorchrun whose {RANKS} workers only import torch: {median(report['bare']):.2f} s\n"
    names = list(starts["this"][0])
    yield "| seconds of rank 0 | " + " | ".join(starts) + " |"
    yield "| --- |" + " ---: |" * len(starts)
    for part in names:
        cells = (median(one.get(part, 0.0) for one in rounds) for rounds in starts.values())
        yield f"| {part} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"
    checks = report["check"]
    for kind in ("seconds", "cpu"):
        cells = (median(one[kind] for one in rounds) for rounds in checks.values())
        label = "pipemega check" + (", of it processor time" if kind == "cpu" else "")
        yield f"| {label} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"
    if "baseline" not in starts:
        return
    ratio = _ratio(starts, "total")
    yield f"\nfirst step: {ratio:.2f} x the baseline; target {TARGET}: {_verdict(ratio <= TARGET)}"
    ratio = _ratio(checks, "cpu")
    yield f"pipemega check: {ratio:.2f} x the baseline; target 1: {_verdict(ratio <= 1.03)}"


def _ratio(rounds: Mapping[str, list[dict[str, float]]], key: str) -> float:
    """Return the median of the ratios of the rounds."""
    pairs = zip(rounds["this"], rounds["baseline"], strict=True)
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
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    raise SystemExit(main())
