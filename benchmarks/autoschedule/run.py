"""Makespan of schedule `auto` for each entry of the golden table, next to published and known ones.

python -m benchmarks.autoschedule.run [--large]
"""

import argparse
import json
import time
from pathlib import Path

from pipemega.pipeline.autoschedule import find_plan, placements_of_rank_costs
from pipemega.pipeline.schedules import RankCosts

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "schedules.json"
# (ranks, micro-batches, memory limit, (F, I, W, c)): sizes and limits that the table does not have.
LARGE = [
    (pp_size, 4 * pp_size, share * pp_size, (1.0, 1.2, 0.8, 0.1))
    for pp_size in (8, 16)
    for share in (0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0)
]


def golden() -> None:
    """Print the golden table with the makespans found and their ratios to the best known ones."""
    table = json.loads(GOLDEN.read_text())
    print("| p | m | costs | limit | published | known | ours | to known | bound | from | s |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    gaps, longer = [], 0
    for row in table["auto"]:
        costs = RankCosts(*table["costs"][row["cost"]])
        began = time.process_time()
        found = find_plan(placements_of_rank_costs(row["p"], costs), row["m"], row["memory_limit"])
        took, reached = time.process_time() - began, found.timeline.makespan
        gaps.append(reached / row["best_known"] - 1)
        longer += reached > row["best_published"] + 1e-9
        print(
            f"| {row['p']} | {row['m']} | {row['cost']} | {row['memory_limit']} | "
            f"{row['best_published']:g} | {row['best_known']:g} | {reached:g} | {gaps[-1]:+.2%} | "
            f"{found.bound:g} | {found.source}, v={found.placement.chunks} | {took:.1f} |",
            flush=True,
        )
    print(
        f"\n{len(gaps)} points, {longer} longer than published; to the best known: "
        f"{sum(gaps) / len(gaps):+.2%} in the mean, {max(gaps):+.2%} at most"
    )


def large() -> None:
    """Print a table for longer pipelines and lower memory limits than the golden table has."""
    print("| p | m | limit | makespan | bound | above it | peak | from | s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for pp_size, num_microbatches, limit, costs in LARGE:
        began = time.process_time()
        placements = placements_of_rank_costs(pp_size, RankCosts(*costs))
        found = find_plan(placements, num_microbatches, limit, seconds=None)
        took, reached = time.process_time() - began, found.timeline.makespan
        print(
            f"| {pp_size} | {num_microbatches} | {limit:g} | {reached:g} | {found.bound:g} | "
            f"{reached / found.bound - 1:.1%} | {max(found.timeline.peak):g} | {found.source}, "
            f"v={found.placement.chunks} | {took:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--large", action="store_true", help="print the table for longer pipelines instead"
    )
    large() if parser.parse_args().large else golden()
