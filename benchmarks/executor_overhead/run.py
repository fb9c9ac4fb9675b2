"""Overhead of the executor: microseconds per instruction of a pipeline with almost no computation.

    python -m benchmarks.executor_overhead.run            from the root of the repository

Two ranks with gloo, stages that multiply by one number, micro-batches of one row of 8. All
instructions of a rank's program count, compute steps and messages; the time of a step is that of
the slower rank.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks import machine, measure

TARGET_MICROSECONDS = 100.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--layer",
        choices=["scale", "linear"],
        default="scale",
        help="a stage: one number, or a linear of 8 x 8, whose weight gradient is deferred to W",
    )
    parser.add_argument(
        "--ahead",
        type=int,
        default=1,
        help="number of compute steps by which receives are posted early",
    )
    parser.add_argument("--profile", action="store_true", help="also print a profile")
    parser.add_argument("--json", type=Path, help="write the full result to this file")
    options = parser.parse_args(argv)
    arguments = ["--microbatches", str(options.microbatches), "--rounds", str(options.rounds)]
    arguments += ["--layer", options.layer, "--ahead", str(options.ahead)]
    arguments += ["--schedules", *options.schedules, *(["--profile"] if options.profile else [])]
    ranks = measure("benchmarks.executor_overhead.worker", 2, arguments)
    report = {"machine": machine(), "rows": [_row(name, ranks) for name in options.schedules]}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(_markdown(report, options))
    if options.profile:
        for name in options.schedules:
            _print_profile(name, ranks[0][name]["profile"])
    return 0


def _row(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    per_rank = [rank[name] for rank in ranks]
    instructions = max(rank["instructions"] for rank in per_rank)
    steps = [max(seconds) for seconds in zip(*(r["seconds"] for r in per_rank), strict=True)]
    cpu = [max(seconds) for seconds in zip(*(r["cpu_seconds"] for r in per_rank), strict=True)]
    return {
        "schedule": name,
        "instructions": instructions,
        "microseconds": median(steps) * 1e6 / instructions,
        "least_microseconds": min(steps) * 1e6 / instructions,
        "cpu_microseconds": median(cpu) * 1e6 / instructions,
        "torch_alone_microseconds": max(r["bare_seconds"] for r in per_rank) * 1e6 / instructions,
    }


def _markdown(report: dict[str, Any], options: argparse.Namespace) -> str:
    about = report["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, Python "
        f"{about['python']}; 2 ranks, {options.microbatches} micro-batches, median of "
        f"{options.rounds} steps, load {about['load_before']:.1f} before.",
        "",
        "| schedule | instructions of a rank | µs per instruction | least | of it the rank's own "
        "CPU time | torch alone |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['schedule']} | {row['instructions']} | {row['microseconds']:.0f} "
        f"| {row['least_microseconds']:.0f} | {row['cpu_microseconds']:.0f} "
        f"| {row['torch_alone_microseconds']:.0f} |"
        for row in report["rows"]
    ]
    return "\n".join(lines)


def _print_profile(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}, rank 0, µs a step under cProfile:")
    for row in rows:
        own, total = row["own_us"], row["with_callees_us"]
        print(f"{own:9.0f} {total:9.0f} {row['calls']:6}  {row['function']}")


if __name__ == "__main__":
    raise SystemExit(main())
