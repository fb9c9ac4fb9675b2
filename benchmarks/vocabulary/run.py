"""Compares a cut vocabulary (`pipeline.vocabulary: "parallel"`) with the best cut without it.

    python -m benchmarks.vocabulary.run            from the root of the repository

Two ranks compute, with vocabularies of 65,536 and 32,768; four ranks sleep, with a head of 10.7 of
8 blocks. The steps of all variants are interleaved in the same processes; times are medians.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.ranks import machine, measure

WORKER = "benchmarks.vocabulary.worker"
# Name, vocabulary (0: sleeping), ranks, least ratio of the time of the best cut.
CASES = (
    ("vocabulary 65,536", 65536, 2, 1.20),
    ("vocabulary 32,768", 32768, 2, 1.00),
    ("sleeping layers, head of 10.7 blocks", 0, 4, 1.80),
)
# The largest share by which parameters and live memory of the ranks may differ.
BALANCE = 0.10


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help="only the cases whose name contains this text", default="")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"machine": machine(), "cases": {}}
    passed = True
    for name, vocabulary, ranks, mark in (case for case in CASES if options.case in case[0]):
        arguments = ["--vocabulary", str(vocabulary), "--rounds", str(options.rounds)]
        results = measure(WORKER, ranks, arguments)
        seconds = {cut: max(rank[cut]["seconds"] for rank in results) for cut in results[0]}
        parallel = seconds["parallel"]
        best = min(time for cut, time in seconds.items() if cut != "parallel")
        ratio = best / parallel
        passed &= _mark(f"{name}: best cut / parallel", ratio, ratio >= mark, f">= {mark:.2f}")
        print("  " + ", ".join(f"{cut} {time * 1e3:.0f} ms" for cut, time in seconds.items()))
        for cut, found in results[0].items() if vocabulary else ():
            measured, simulated = found["pipeline"], found["simulated"]
            print(
                f"  {cut}: forwards and backwards {measured * 1e3:.0f} ms, simulated "
                f"{simulated * 1e3:.0f} ms, measured / simulated {measured / simulated:.2f}"
            )
        for quantity in ("parameters", "live") if vocabulary else ():
            values = [rank["parallel"][quantity] for rank in results]
            spread = max(values) / min(values) - 1
            without = [rank["head alone"][quantity] for rank in results]
            passed &= _mark(
                f"{name}: {quantity} of the ranks differ by", spread, spread <= BALANCE, "<= 0.10"
            )
            print(f"  parallel {values}, head alone {without}")
        report["cases"][name] = {"ratio": ratio, "ranks": results}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


def _mark(name: str, value: float, passed: bool, limit: str) -> bool:
    print(f"{'pass' if passed else 'FAIL'}  {name} {value:.3f} ({limit})")
    return passed


if __name__ == "__main__":
    raise SystemExit(main())
