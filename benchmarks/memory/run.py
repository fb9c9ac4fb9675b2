"""Compares the memory per rank of pipemega with torch's ZeroRedundancyOptimizer and FSDP2.

    python -m benchmarks.memory.run            from the root of the repository

One GPT, one batch, AdamW; every system on the same number of ranks, in new processes over gloo.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.memory.config import config_of
from benchmarks.pipeline_cpu.model import Sizes
from benchmarks.ranks import machine, measure
from pipemega.config import load
from pipemega.planning.estimate import Report, Request, estimate

WORKER = "benchmarks.memory.worker"
PEERS = ("zero-redundancy", "fsdp2:reshard", "fsdp2:keep")
OURS = {
    2: ("pipemega:1x2", "pipemega:2x1", "pipemega:2x1@auto"),
    4: (
        "pipemega:1x4",
        "pipemega:2x2",
        "pipemega:2x2@auto",
        "pipemega:4x1",
        "pipemega:4x1@auto",
    ),
}
MB = 1e6
# Freed memory returns to the kernel at once, so resident memory equals allocated memory.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    os.environ.update(MALLOC)
    sizes = Sizes()
    words = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.memory.run", *words]),
        "machine": machine(),
        "sizes": asdict(sizes),
        "rows": [],
    }
    if options.resume:
        report["rows"] = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["system"], row["ranks"], row["dtype"]) for row in report["rows"]}
    for ranks in options.ranks:
        for dtype in options.dtypes:
            for system in (*PEERS, *OURS[ranks]):
                if (system, ranks, dtype) in done:
                    continue
                report["rows"].append(_row(system, ranks, dtype, sizes))
                if options.json is not None:
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(_markdown(report["rows"]))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(OURS), default=sorted(OURS))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of the --json file and measure the others",
    )
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    return options


def _row(system: str, ranks: int, dtype: str, sizes: Sizes) -> dict[str, Any]:
    """Return the megabytes of each rank, for pipemega also the planned peak of the fullest rank."""
    arguments = ["--system", system, "--dtype", dtype, "--sizes", json.dumps(asdict(sizes))]
    measured = measure(WORKER, ranks, arguments)
    row: dict[str, Any] = {"system": system, "ranks": ranks, "dtype": dtype}
    for key in ("peak", "between_steps"):
        row[key] = [round(rank[key] / MB, 1) for rank in measured]
    name, _, kind = system.partition(":")
    if name == "pipemega":
        memory = _planned(sizes, dtype, kind).prediction.memory
        row["planned_peak"] = round(max(rank.total for rank in memory) / MB, 1)
        row["planned_between_steps"] = round(max(r.footprint.total for r in memory) / MB, 1)
    return row


def _planned(sizes: Sizes, dtype: str, kind: str) -> Report:
    return estimate(Request(load(config_of(sizes, dtype, kind))))


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | dtype | system | fullest rank, MB | planned | between steps, MB | planned | "
        "ratio to the lower peer |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        alike = [r for r in rows if (r["ranks"], r["dtype"]) == (row["ranks"], row["dtype"])]
        lowest = min(max(r["peak"]) for r in alike if r["system"] in PEERS)
        peak = max(row["peak"])
        lines.append(
            f"| {row['ranks']} | {row['dtype']} | {row['system']} | {peak:.0f} | "
            f"{row.get('planned_peak', '')} | {max(row['between_steps']):.0f} | "
            f"{row.get('planned_between_steps', '')} | {peak / lowest:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
