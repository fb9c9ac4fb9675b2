"""The plans of pipemega in the comparison: named schedules, schedule `auto`, and files."""

from collections.abc import Mapping
from pathlib import Path

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule import find_plan, placements_of_rank_costs
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.schedules import SCHEDULES, RankCosts, build_plan

# Time of a message in cost units of 60 ms, so that `auto` takes messages into account.
MESSAGE = 0.02

# Name -> its memory limit in activation units, as text.
LIMITS: dict[str, str] = {
    "auto": "p units, as much as 1F1B",
    "auto-half": "p / 2 + 1 units",
    "auto-2p": "2 p units",
}


def limit(name: str, ranks: int) -> float:
    """Return the memory limit of the search, in activation units."""
    return {"auto": ranks, "auto-half": ranks / 2 + 1, "auto-2p": 2 * ranks}[name]


def find_plans(
    names: list[str],
    ranks: int,
    microbatches: int,
    costs: tuple[float, ...],
    files: Mapping[str, Path],
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plans of `names` (without `pipemega:`), and the reasons for missing ones."""
    plans, missing = {}, {}
    for name in names:
        try:
            if name in files:
                plans[name] = _read_plan(files[name], ranks, microbatches)
            elif name in SCHEDULES:
                plans[name] = build_plan(name, ranks, microbatches)
            else:
                plans[name] = _search_plan(name, ranks, microbatches, costs)
        except ScheduleError as error:
            missing[name] = str(error)
    return plans, missing


def _read_plan(path: Path, ranks: int, microbatches: int) -> Plan:
    text = path.read_text(encoding="utf-8")
    plan = Plan.from_json(text) if path.suffix == ".json" else Plan.from_csv(text, path.stem)
    if (plan.num_ranks, plan.num_microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"{path} is for {plan.num_ranks} ranks and {plan.num_microbatches} micro-batches"
        )
    return plan


def _search_plan(name: str, ranks: int, microbatches: int, costs: tuple[float, ...]) -> Plan:
    placements = placements_of_rank_costs(ranks, RankCosts(*costs, MESSAGE), chunks=(1, 2))
    return find_plan(placements, microbatches, limit(name, ranks)).plan
