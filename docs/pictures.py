"""Draws the pictures of README and docs: `make pictures`, or `python -m docs.pictures [NAME ...]`.

One of each schedule, with what its ranks hold, and a few above each other at one scale; 4 ranks,
8 micro-batches, F = I = W, no time for messages.
"""

import sys
from pathlib import Path

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.pictures import Panel, svg
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.simulate import simulate

FOLDER = Path(__file__).with_name("pictures")
TOGETHER = "schedules"
SHOWN_TOGETHER = ("1f1b", "interleaved", "zb-h1", "zb-v")
NAMES = (TOGETHER, *SCHEDULES)


def picture(name: str) -> str:
    """The picture of a schedule, or of a few of them, as SVG."""
    if name == TOGETHER:
        return svg([panel(each) for each in SHOWN_TOGETHER])
    return svg(panel(name), memory=True)


def panel(name: str) -> Panel:
    plan = build_plan(name, 4, 8)
    return Panel(simulate(plan, CostModel.shared(plan.rank_of_stage)))


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or NAMES:
        (FOLDER / f"{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
