"""Overhead of the executor: microseconds per instruction of a pipeline with almost no computation.

    python -m benchmarks.executor_overhead.run            from the root of the repository

Two ranks with gloo, stages that multiply by one number or have a linear of 8 x 8, micro-batches of
one row of 8. All instructions of a rank's program count, compute steps and messages; the time of a
step is the time of the slower rank. With `--baseline` another source tree is measured in the same
run: its steps and the steps of this tree alternate.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import ROOT, machine, measure

# The mark: microseconds, relative to the baseline.
MOST = 0.6


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    trees = {"this tree": ROOT}
    if options.baseline is not None:
        trees["baseline"] = options.baseline.resolve()
    about = machine()
    found = _measure(trees, options)
    rows = [
        {"layer": layer, "schedule": name}
        | {tree: _row(f"{layer} {name}", ranks) for tree, ranks in found.items()}
        for layer in options.layers
        for name in options.schedules
    ]
    if options.json is not None:
        report = {"machine": about, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, Python "
        f"{about['python']}; 2 ranks, {options.microbatches} micro-batches, median of "
        f"{options.rounds} steps, load {about['load_before']:.1f} before.\n"
    )
    print(_markdown(rows))
    if options.profile:
        for layer in options.layers:
            for name in options.schedules:
                rank = found["this tree"][0]
                _print_profile(f"{name}, {layer}", rank[f"{layer} {name}"]["profile"])
    return 0 if options.baseline is None else _print_marks(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, help="another source tree, such as a worktree")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=["scale", "linear"],
        default=["scale", "linear"],
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
    return parser


def _measure(trees: dict[str, Path], options: argparse.Namespace) -> dict[str, list[Any]]:
    """Return tree -> the results of its ranks."""
    limit = timedelta(minutes=1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    store.set("turn 0", "")
    arguments = ["--microbatches", str(options.microbatches), "--rounds", str(options.rounds)]
    arguments += ["--ahead", str(options.ahead), "--layers", *options.layers, "--schedules"]
    arguments += [*options.schedules, *(["--profile"] if options.profile else [])]
    arguments += ["--turns", str(store.port), "--systems", str(len(trees))]

    def ranks(number: int, tree: Path) -> list[Any]:
        own = ["--tree", str(tree), "--system", str(number)]
        return measure("benchmarks.executor_overhead.rank", 2, [*arguments, *own])

    with ThreadPoolExecutor() as threads:
        started = {n: threads.submit(ranks, at, t) for at, (n, t) in enumerate(trees.items())}
        return {name: future.result() for name, future in started.items()}


def _row(key: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    per_rank = [rank[key] for rank in ranks]
    instructions = max(rank["instructions"] for rank in per_rank)

    def slower(name: str) -> list[float]:
        return [max(values) for values in zip(*(r[name] for r in per_rank), strict=True)]

    return {
        "instructions": instructions,
        "microseconds": median(slower("seconds")) * 1e6 / instructions,
        "least_microseconds": min(slower("seconds")) * 1e6 / instructions,
        "cpu_microseconds": median(slower("cpu_seconds")) * 1e6 / instructions,
        "torch_alone_microseconds": max(r["bare_seconds"] for r in per_rank) * 1e6 / instructions,
        "python_calls": max(rank["python_calls"] for rank in per_rank) / instructions,
        "waits": median(slower("switches")) / instructions,
    }


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layer | schedule | tree | instructions of a rank | µs per instruction | least "
        "| CPU time of the rank | torch alone | Python calls | waits |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        for tree in [name for name in ("baseline", "this tree") if name in row]:
            of = row[tree]
            lines.append(
                f"| {row['layer']} | {row['schedule']} | {tree} | {of['instructions']} "
                f"| {of['microseconds']:.0f} | {of['least_microseconds']:.0f} "
                f"| {of['cpu_microseconds']:.0f} | {of['torch_alone_microseconds']:.0f} "
                f"| {of['python_calls']:.1f} | {of['waits']:.2f} |"
            )
    return "\n".join(lines)


def _print_marks(rows: list[dict[str, Any]]) -> int:
    """Print the ratios to the baseline; return 1 if one is above the mark."""
    print()
    failed = 0
    for row in rows:
        ratio = row["this tree"]["microseconds"] / row["baseline"]["microseconds"]
        verdict = "pass" if ratio <= MOST else "FAIL"
        failed += ratio > MOST
        print(f"{row['schedule']:6} {row['layer']:6} {ratio:.2f} x the baseline  {verdict}")
    print(f"target: at most {MOST} x the wall-clock of the baseline per instruction")
    return int(failed > 0)


def _print_profile(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}, rank 0, µs a step under cProfile:")
    for row in rows:
        own, total = row["own_us"], row["with_callees_us"]
        print(f"{own:9.0f} {total:9.0f} {row['calls']:6}  {row['function']}")


if __name__ == "__main__":
    raise SystemExit(main())
