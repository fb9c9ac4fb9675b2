"""The table of 1F1B and zero bubble in docs/coming_from.md: measured and simulated numbers."""

import re
from pathlib import Path

import pytest

from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import build_plan

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
BENCHMARK = (ROOT / "benchmarks/zero_bubble/README.md").read_text(encoding="utf-8")
# Pipeline ranks, micro-batches; in the order of the columns.
LAYOUTS = {"PP": (4, 16), "SP+PP": (2, 16), "DP+PP": (2, 8)}
# Times of F, I and W of a block.
TIMES = (20, 24, 16)


def row(name: str) -> list[str]:
    """Return the cells of the row of the page whose first cell is `name`."""
    (cells,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.M)
    return [cell.strip() for cell in cells.split("|")]


def test_the_measured_numbers_are_those_of_the_benchmark() -> None:
    found = re.findall(
        r"^\| (\S+) \| (\S+) \| ([\d.]+) \| ([+-][\d.]+)% \|", BENCHMARK.split("## Result")[1], re.M
    )
    measured = {(layout, schedule): (rate, gain) for layout, schedule, rate, gain in found}
    assert row("pipemega, `1f1b`") == [measured[layout, "1f1b"][0] for layout in LAYOUTS]
    expected = ["{} ({} %)".format(*measured[layout, "zb-v"]) for layout in LAYOUTS]
    assert row("pipemega, `zb-v`") == expected


@pytest.mark.parametrize("column", range(3), ids=list(LAYOUTS))
def test_the_simulated_gains_are_those_of_the_simulator(column: int) -> None:
    ranks, num_microbatches = list(LAYOUTS.values())[column]
    seconds = []
    for schedule in ("1f1b", "zb-v"):
        plan = build_plan(schedule, ranks, num_microbatches)
        costs = CostModel.from_rank_costs(plan.rank_of_stage, *TIMES, 0)
        seconds.append(simulate(plan, costs).makespan)
    gain = 100 * (seconds[0] / seconds[1] - 1)
    assert row("simulated")[column] == f"+{gain:.1f} %"
