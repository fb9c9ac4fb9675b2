"""`python -m pipemega schedule auto`: options, search and output of schedule `auto`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule import (
    AutoPlan,
    Placement,
    find_plan,
    limit_of_1f1b,
    placements_of_rank_costs,
    placements_of_stage_costs,
)
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.schedules import RankCosts
from pipemega.pipeline.visualize.text import draw_text
from pipemega.printing import percent

STAGE_COSTS = """\
--stage-costs: a JSON object, or the path of a file that contains one:
  {"forward": [1, 1, 1, 1.4], "backward_input": [1, 1, 1, 1.5], "backward_weight": [1, 1, 1, 1.2],
   "backward": [..], "activation": [..], "kept": [..], "message": 0.1}
  One number per stage, in the order of the model, for P stages or a multiple of P. The last four
  are optional. backward: time of a whole backward (default: backward_input + backward_weight);
  activation: memory held from the start of F (default: 1); kept: memory held between I and W
  (default: the same as activation).
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of schedule `auto`."""
    parser.add_argument(
        "--stage-costs",
        type=stage_costs,
        metavar="JSON",
        help="auto only: costs of each stage instead of --costs, see below",
    )
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="auto only: minimise the time from the first instruction of any rank to the end of "
        "the last (makespan), or the longest time of any rank (span); default: makespan",
    )
    parser.add_argument(
        "--seconds",
        type=limit,
        default=60.0,
        metavar="S",
        help="auto only: time limit of the search (default: 60, enough for 16 ranks and 64 "
        "micro-batches)",
    )


def search(arguments: argparse.Namespace) -> AutoPlan:
    """Return the plan for the command-line arguments.

    Without --memory-limit, a rank may hold as much as under 1F1B: P micro-batches.

    Raises:
        ScheduleError: a size or cost is invalid, or no plan keeps the limit.
    """
    placements = _placements(arguments)
    limit = arguments.memory_limit
    if limit is None:
        limit = limit_of_1f1b(placements, arguments.microbatches)
    return find_plan(
        placements,
        arguments.microbatches,
        limit or None,
        objective=arguments.objective,
        seconds=arguments.seconds,
    )


def _placements(arguments: argparse.Namespace) -> list[Placement]:
    chunks: int | None = arguments.chunks
    if arguments.stage_costs is None:
        counts = (1, 2, 4) if chunks is None else (chunks,)
        return placements_of_rank_costs(arguments.pp, arguments.costs, counts)
    costs: CostModel = arguments.stage_costs
    placements = placements_of_stage_costs(arguments.pp, costs)
    if chunks not in (None, placements[0].chunks):
        raise ScheduleError(
            f"--stage-costs has {costs.num_stages} stages, {placements[0].chunks} on each of "
            f"{arguments.pp} ranks, but --chunks is {chunks}: remove --chunks"
        )
    return placements


def text(found: AutoPlan, costs: RankCosts | None, objective: str, width: int) -> str:
    """Return the drawing and the figures of a plan.

    Args:
        costs: per rank; None if costs per stage were given.
        objective: what was minimised.
        width: of the drawing.
    """
    plan, timeline, chunks = found.plan, found.timeline, found.placement.chunks
    stages = f"{chunks} stages per rank ({_shape(found.placement)}), " if chunks > 1 else ""
    given = "costs per stage"
    if costs is not None:
        given = (
            f"F={costs.forward:g} I={costs.backward_input:g} W={costs.backward_weight:g} "
            f"c={costs.message:g} per rank"
        )
    reached = timeline.span if objective == "span" else timeline.makespan
    above = reached / found.bound - 1 if found.bound else 0.0
    gap = f"{percent(above, 2)} above" if above > 1e-9 else "at"
    return "\n".join(
        (
            f"auto: {plan.num_ranks} ranks, {stages}{plan.num_microbatches} micro-batches; {given}",
            "",
            draw_text(timeline, width),
            "",
            f"makespan   {timeline.makespan:g}   (from the first instruction to the last)",
            f"span       {timeline.span:g}   (longest time of a rank, from its own first "
            f"instruction to its own last)",
            f"bubble     {percent(timeline.bubble, 2)}",
            f"memory     {peaks(timeline.peak)} held at most, per rank",
            f"bound      {found.bound:g}   (lower limit of the {objective} within this memory; "
            f"this plan is {gap} it)",
            f"origin     {found.source}",
        )
    )


def peaks(held: Sequence[float], most: int = 16) -> str:
    """Return the peak memory of each rank in one line."""
    words = [f"{peak:g}" for peak in held]
    if len(words) > most:
        words[most:] = [f".. (the highest: {max(held):g})"]
    return " ".join(words)


def stage_costs(text: str) -> CostModel:
    """Return the costs in `text`: JSON, or the path of a JSON file.

    Raises:
        argparse.ArgumentTypeError: neither of them, or invalid costs.
    """
    try:
        written = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"neither JSON nor a JSON file: {error}") from error
    known = [field.name for field in fields(CostModel) if field.name != "vocabulary"]
    needed = known[:3]
    if not isinstance(written, dict) or not set(needed) <= set(written) <= set(known):
        found = ", ".join(written) if isinstance(written, dict) else type(written).__name__
        raise argparse.ArgumentTypeError(
            f"stage costs need the keys {', '.join(needed)} and may have "
            f"{', '.join(known[3:])}, not {found}"
        )
    for key, value in written.items():
        numbers = [value] if key == "message" else value
        if not isinstance(numbers, list) or not all(map(_is_number, numbers)) or not numbers:
            raise argparse.ArgumentTypeError(
                f"{key} of the stage costs: give "
                f"{'a number' if key == 'message' else 'a list of numbers, one per stage'}"
            )
    try:
        message = float(written.pop("message", 0.0))
        times: dict[str, Any] = {key: tuple(map(float, value)) for key, value in written.items()}
        return CostModel(**times, message=message)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def limit(text: str) -> float:
    """Return the number in `text`, which must be above 0."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return limit


def _is_number(value: object) -> bool:
    # In Python bool is an int, but true is not a valid number here.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shape(placement: Placement) -> str:
    ranks, rank_of_stage = placement.num_ranks, placement.rank_of_stage
    return (
        "in a v" if rank_of_stage[ranks - 1] == rank_of_stage[ranks] and ranks > 1 else "in a loop"
    )
