"""Draws the pictures of README and docs: `make pictures`, or `python -m docs.pictures [NAME ...]`.

One picture of each schedule with the memory of its ranks, and one picture of a few schedules on one
time axis; each as NAME.svg for light pages and as NAME-dark.svg for dark ones. 4 ranks, 8
micro-batches, F = I = W, messages take no time. `schedule_table` returns the table of
docs/schedules.md.
"""

import sys
from pathlib import Path

from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import SCHEDULES, Sizes, build_plan
from pipemega.pipeline.schedules.building_blocks import ALWAYS
from pipemega.pipeline.visualize import Panel, svg
from pipemega.printing import percent

FOLDER = Path(__file__).with_name("pictures")
OVERVIEW = "schedules"
IN_OVERVIEW = ("1f1b", "interleaved", "zb-h1", "zb-v")
NAMES = (OVERVIEW, *SCHEDULES)


def picture(name: str, dark: bool = False) -> str:
    """Return the picture of a schedule, or the overview, as SVG."""
    if name == OVERVIEW:
        return svg([panel(each) for each in IN_OVERVIEW], dark=dark)
    return svg(panel(name), memory=True, dark=dark)


def file_of(name: str, dark: bool = False) -> Path:
    return FOLDER / f"{name}{'-dark' if dark else ''}.svg"


def panel(name: str) -> Panel:
    plan = build_plan(name, 4, 8)
    return Panel(simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage)))


def schedule_table(pp_size: int = 4, num_microbatches: int = 8) -> str:
    """Return a Markdown table of all schedules with their formulas and an example."""
    header = (
        "schedule",
        "stages per rank",
        "makespan",
        "exact where",
        f"bubble at p={pp_size}, m={num_microbatches}",
        "peak micro-batches on rank r",
        "source",
    )
    rows = []
    for family in SCHEDULES.values():
        sizes = Sizes(pp_size, num_microbatches, family.default_chunks)
        stages = "any" if family.chunks is None else str(family.chunks)
        rows.append(
            (
                ", ".join(f"`{name}`" for name in (family.name, *family.aliases)),
                stages + (", in a V" if family.placement == "v" else ""),
                f"`{family.makespan}`",
                "always" if family.exact == ALWAYS else f"`{family.exact}`",
                percent(family.bubble(sizes)),
                f"`{family.peak}`",
                family.source,
            )
        )
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or NAMES:
        for dark in (False, True):
            file_of(name, dark).write_text(picture(name, dark), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
