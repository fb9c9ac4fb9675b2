"""The plans of pipemega that a comparison is run with: named ones, synthesised ones, from files."""

from collections.abc import Mapping
from pathlib import Path

from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.schedules import SCHEDULES, ShareCosts, build_plan
from pipemega.pipeline.synthesis import layouts_of_shares, synthesize

# What a message takes here, in shares of 60 ms: `auto` is to prefer plans that can bear it.
MESSAGE = 0.02

# Name -> the memory limit in activation units for so many ranks.
LIMITS: dict[str, str] = {
    "auto": "p units, as much as 1F1B",
    "auto-half": "p / 2 + 1 units",
    "auto-2p": "2 p units",
}


def limit(name: str, ranks: int) -> float:
    """The memory limit of a synthesised plan, in activation units."""
    return {"auto": ranks, "auto-half": ranks / 2 + 1, "auto-2p": 2 * ranks}[name]


def find_plans(
    names: list[str],
    ranks: int,
    microbatches: int,
    costs: tuple[float, ...],
    files: Mapping[str, Path],
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plans of `names` (without `pipemega:`), and why some are missing."""
    plans, missing = {}, {}
    for name in names:
        try:
            if name in files:
                plans[name] = _of_file(files[name], ranks, microbatches)
            elif name in SCHEDULES:
                plans[name] = build_plan(name, ranks, microbatches)
            else:
                plans[name] = _synthesised(name, ranks, microbatches, costs)
        except ScheduleError as error:
            missing[name] = str(error)
    return plans, missing


def _of_file(path: Path, ranks: int, microbatches: int) -> Plan:
    text = path.read_text(encoding="utf-8")
    plan = Plan.from_json(text) if path.suffix == ".json" else Plan.from_csv(text, path.stem)
    if (plan.num_ranks, plan.num_microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"{path} is for {plan.num_ranks} ranks and {plan.num_microbatches} micro-batches"
        )
    return plan


def _synthesised(name: str, ranks: int, microbatches: int, costs: tuple[float, ...]) -> Plan:
    layouts = layouts_of_shares(ranks, ShareCosts(*costs, MESSAGE), chunks=(1, 2))
    return synthesize(layouts, microbatches, limit(name, ranks)).plan
