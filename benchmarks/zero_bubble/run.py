"""Compares 1F1B with zero-bubble schedules: pipeline only, with sequence or data parallelism.

    python -m benchmarks.zero_bubble.run            from the root of the repository

Reproduces the form of the table in Colossal-AI's document on its zero-bubble schedule, with
pipemega: complete steps with loss, reductions, gradient norm and optimizer, on four ranks of one
machine. The blocks of the GPT are small, send the same messages as large ones and sleep instead of
long computations; see the README.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks import machine, measure

LAYOUTS: dict[str, dict[str, Any]] = {
    "PP": {"pipeline": 4},
    "SP+PP": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    "DP+PP": {"pipeline": 2, "data": 2},
}
RANKS = 4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--samples", type=int, default=16, help="samples per step, one per micro-batch"
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument(
        "--block-ms",
        type=float,
        nargs=3,
        default=[20.0, 24.0, 16.0],
        metavar=("F", "I", "W"),
        help="milliseconds that a block sleeps for one sample (default: 20 24 16)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the whole result to this file")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"machine": machine(), "options": _plain(options), "rows": []}
    for layout in options.layouts:
        report["rows"] += _rows(layout, options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(_markdown(report))
    return 0


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if not isinstance(value, Path)}


def _rows(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    task = {
        "mesh": LAYOUTS[layout],
        "schedules": options.schedules,
        "samples": options.samples,
        "blocks": options.blocks,
        "block": [part / 1e3 for part in options.block_ms],
        "rounds": options.rounds,
        "hidden": 32,
        "seq": 32,
    }
    ranks = measure("benchmarks.zero_bubble.worker", RANKS, ["--task", json.dumps(task)])
    seconds = {schedule: _steps(schedule, ranks) for schedule in options.schedules}
    first = seconds[options.schedules[0]]
    # In the ideal step no rank waits.
    ideal = options.samples * options.blocks * sum(options.block_ms) / 1e3 / RANKS
    return [
        {
            "layout": layout,
            "schedule": schedule,
            "samples_per_second": options.samples / median(steps),
            "gain": median(a / b for a, b in zip(first, steps, strict=True)) - 1,
            "of_ideal": ideal / median(steps),
            "seconds": steps,
        }
        for schedule, steps in seconds.items()
    ]


def _steps(schedule: str, ranks: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each round, from the first start to the last end of a rank."""
    rounds = zip(*(rank[schedule] for rank in ranks), strict=True)
    return [max(end for _, end in turn) - min(start for start, _ in turn) for turn in rounds]


def _markdown(report: dict[str, Any]) -> str:
    about, options = report["machine"], report["options"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}; {RANKS} ranks, "
        f"{options['samples']} samples per step, {options['blocks']} blocks that sleep "
        f"{', '.join(f'{ms:g}' for ms in options['block_ms'])} ms; median of {options['rounds']} "
        f"rounds, load {about['load_before']:.1f} before.",
        "",
        f"| layout | schedule | samples/s | against {options['schedules'][0]} | of the ideal |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['layout']} | {row['schedule']} | {row['samples_per_second']:.2f} "
        f"| {row['gain']:+.1%} | {row['of_ideal']:.3f} |"
        for row in report["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
