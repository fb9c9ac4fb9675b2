"""Measures the bubble of the schedules of pipemega and torch, with stages that sleep.

    python -m benchmarks.bubble.run            from the root of the repository

For each number of ranks, number of micro-batches and set of costs, starts processes connected by
gloo, in which all systems run in turn. The time of a step is from the first rank that leaves a
barrier to the last that finishes. The README explains the columns.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bubble.plans import find_plans
from benchmarks.bubble.systems import names
from benchmarks.bubble.timing import lags, timeline
from benchmarks.ranks import machine, measure
from pipemega.pipeline.plan.instructions import Plan

TOLERANCE = 1.03


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    files = {path.stem: path for path in options.plan}
    systems = names(options.systems, files)
    report: dict[str, Any] = {
        "command": "python -m benchmarks.bubble.run "
        + " ".join(sys.argv[1:] if argv is None else argv),
        "machine": machine(),
        "options": {"share_ms": options.share_ms, "rounds": options.rounds},
        "tables": [],
    }
    for costs in options.costs:
        for ranks in options.ranks:
            for microbatches in options.microbatches:
                table = _table(ranks, microbatches, costs, systems, files, options)
                report["tables"].append(table)
                print(_markdown(table), flush=True)
                if options.json is not None:
                    # After each table, so that a stopped run keeps its results.
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        from benchmarks.bubble.plot import plot

        plot(report, options.plot)
    print(_summary(report))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument(
        "--costs",
        type=_costs,
        nargs="+",
        default=[(1.0, 1.0, 1.0), (1.0, 1.2, 0.8)],
        metavar="F,I,W",
        help="times of one micro-batch on a rank, in cost units (default: 1,1,1 and 1,1.2,.8)",
    )
    parser.add_argument(
        "--share-ms", type=float, default=60.0, help="milliseconds of a cost unit (default: 60)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--systems",
        nargs="*",
        default=[],
        metavar="NAME",
        help="pipemega:SCHEDULE, torch:SCHEDULE, pipemega: or torch: for all of one (default: all)",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="your own plans, as JSON or CSV; the name is pipemega:STEM",
    )
    parser.add_argument("--json", type=Path, help="write the whole result to this file")
    parser.add_argument(
        "--plot", type=Path, help="draw the result to this file, .svg or .png (needs matplotlib)"
    )
    return parser.parse_args(argv)


def _costs(text: str) -> tuple[float, ...]:
    costs = tuple(float(part) for part in text.split(","))
    if len(costs) != 3 or min(costs) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give three numbers above 0, as in 1,1.2,.8")
    return costs


def _table(
    ranks: int,
    microbatches: int,
    costs: tuple[float, ...],
    systems: list[str],
    files: dict[str, Path],
    options: argparse.Namespace,
) -> dict[str, Any]:
    share = [str(options.share_ms / 1e3 * cost) for cost in costs]
    arguments = ["--microbatches", str(microbatches), "--share", *share]
    own = [name.removeprefix("pipemega:") for name in systems if name.startswith("pipemega:")]
    plans, missing = find_plans(own, ranks, microbatches, costs, files)
    available = [name for name in systems if name.removeprefix("pipemega:") not in missing]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "plans.json")
        texts = {name: plan.to_json() for name, plan in plans.items()}
        written.write_text(json.dumps(texts), encoding="utf-8")
        arguments += ["--plans", str(written), "--rounds", str(options.rounds)]
        results = measure("benchmarks.bubble.worker", ranks, [*arguments, "--systems", *available])
    rows = [_row(name, [r["systems"][name] for r in results]) for name in results[0]["systems"]]
    refused = {f"pipemega:{name}": reason for name, reason in missing.items()}
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "costs": costs,
        "rows": rows,
        "refused": refused | results[0]["refused"],
        "marks": comparisons(rows),
    }


def _row(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))
    steps = [max(r["end"] for r in turn) - min(r["start"] for r in turn) for turn in rounds]
    plan, ideal = Plan.from_json(ranks[0]["plan"]), ranks[0]["ideal"]
    measured = timeline(plan, [r["parts"] for r in ranks], [r["sleeps"] for r in ranks])
    slept = [r["slept"] / ideal for turn in rounds for r in turn]
    return {
        "system": name,
        "simulated": ranks[0]["simulated"] / ideal,
        "rounds": [step / ideal for step in steps],
        "measured": median(steps) / ideal,
        "over_simulation": median(steps) / ranks[0]["simulated"],
        "peak": max(entry["peak"] for turn in rounds for entry in turn),
        "simulated_peak": ranks[0]["simulated_peak"],
        "overslept": median(slept),
        "lag_us": lags(measured),
        "cpu_ms": 1e3 * max(median(e["cpu"] for e in r["rounds"]) for r in ranks),
    }


def comparisons(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparisons by name: (system, ratio, whether pipemega reaches the goal)."""
    ours = [row for row in rows if row["system"].startswith("pipemega:")]
    theirs = [row for row in rows if row["system"].startswith("torch:")]
    worst = max(ours, key=lambda row: row["over_simulation"], default=None)
    result: dict[str, Any] = {
        "worst over simulation": None
        if worst is None
        else [worst["system"], worst["over_simulation"], worst["over_simulation"] <= TOLERANCE]
    }
    for name in ("pipemega:zb-v", "pipemega:auto", "pipemega:auto-2p"):
        own = next((row for row in ours if row["system"] == name), None)
        # Compare with systems that hold the same memory or more.
        peers = [row for row in theirs if own and row["peak"] >= own["peak"] - 1e-9]
        if own is not None and peers:
            best = min(peers, key=lambda row: row["measured"])
            result[f"{name} against torch"] = [
                best["system"],
                best["measured"] / own["measured"],
                own["measured"] < best["measured"],
            ]
    return result


def _markdown(table: dict[str, Any]) -> str:
    costs = ", ".join(f"{cost:g}" for cost in table["costs"])
    lines = [
        f"\n### {table['ranks']} ranks, {table['microbatches']} micro-batches, F, I, W = {costs}\n",
        "| system | step / ideal | simulated | measured / simulated | peak units | overslept "
        "| lag own, µs | lag message, µs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in table["rows"]:
        own, message = row["lag_us"]["own"], row["lag_us"]["message"]
        lines.append(
            f"| {row['system']} | {row['measured']:.3f} | {row['simulated']:.3f} "
            f"| {row['over_simulation']:.3f} | {row['peak']:g} | {row['overslept'] - 1:.1%} "
            f"| {_number(own)} | {_number(message)} |"
        )
    lines += [""] + [f"- {name}: {reason}" for name, reason in table["refused"].items()]
    for name, value in table["marks"].items():
        if value is not None:
            lines.append(f"- {name}: {value[0]} {value[1]:.3f}, {'yes' if value[2] else 'no'}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _summary(report: dict[str, Any]) -> str:
    about = report["machine"]
    return (
        f"\n{about['cpu']}, {about['cores']} cores, torch {about['torch']}, Python "
        f"{about['python']}; load {about['load_before']:.1f} before; cost unit "
        f"{report['options']['share_ms']:g} ms, median of {report['options']['rounds']} rounds.\n"
        f"`{report['command'].strip()}`"
    )


if __name__ == "__main__":
    raise SystemExit(main())
