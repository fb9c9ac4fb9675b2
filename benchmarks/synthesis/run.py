"""What schedule `auto` reaches at every point of the golden table, beside what others do.

python -m benchmarks.synthesis.run [--large]
"""

import argparse
import json
import time
from pathlib import Path

from pipemega.pipeline.schedules import ShareCosts
from pipemega.pipeline.synthesis import layouts_of_shares, synthesize

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "schedules.json"
# Ranks, micro-batches, memory limit, F, I, W, c: what the table has nothing of.
LARGE = [
    (pp_size, 4 * pp_size, share * pp_size, (1.0, 1.2, 0.8, 0.1))
    for pp_size in (8, 16)
    for share in (0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0)
]


def golden() -> None:
    """The table of the marks, and the gaps to the best that is known."""
    table = json.loads(GOLDEN.read_text())
    print("| p | m | costs | limit | published | known | ours | to known | bound | from | s |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    gaps, longer = [], 0
    for row in table["auto"]:
        costs = ShareCosts(*table["costs"][row["cost"]])
        began = time.process_time()
        found = synthesize(layouts_of_shares(row["p"], costs), row["m"], row["memory_limit"])
        took, reached = time.process_time() - began, found.timeline.makespan
        gaps.append(reached / row["best_known"] - 1)
        longer += reached > row["best_published"] + 1e-9
        print(
            f"| {row['p']} | {row['m']} | {row['cost']} | {row['memory_limit']} | "
            f"{row['best_published']:g} | {row['best_known']:g} | {reached:g} | {gaps[-1]:+.2%} | "
            f"{found.bound:g} | {found.source}, v={found.layout.chunks} | {took:.1f} |",
            flush=True,
        )
    print(
        f"\n{len(gaps)} points, {longer} longer than published; to the best known: "
        f"{sum(gaps) / len(gaps):+.2%} in the mean, {max(gaps):+.2%} at most"
    )


def large() -> None:
    """Longer pipelines, and less memory, than the table has."""
    print("| p | m | limit | makespan | bound | above it | peak | from | s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for pp_size, num_microbatches, limit, costs in LARGE:
        began = time.process_time()
        layouts = layouts_of_shares(pp_size, ShareCosts(*costs))
        found = synthesize(layouts, num_microbatches, limit, seconds=None)
        took, reached = time.process_time() - began, found.timeline.makespan
        print(
            f"| {pp_size} | {num_microbatches} | {limit:g} | {reached:g} | {found.bound:g} | "
            f"{reached / found.bound - 1:.1%} | {max(found.timeline.peak):g} | {found.source}, "
            f"v={found.layout.chunks} | {took:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the second table instead")
    large() if parser.parse_args().large else golden()
