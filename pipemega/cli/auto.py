"""`python -m pipemega schedule auto`: a schedule looked for, by costs and a memory limit."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.render import draw
from pipemega.pipeline.schedules import ShareCosts
from pipemega.pipeline.synthesis import (
    Layout,
    Synthesis,
    layouts_of_shares,
    layouts_of_stages,
    prove,
    synthesize,
)

STAGE_COSTS = """\
costs of stages that differ (--stage-costs), a JSON object, or the path of a file with one:
  {"forward": [1, 1, 1, 1.4], "backward_input": [1, 1, 1, 1.5], "backward_weight": [1, 1, 1, 1.2],
   "backward": [..], "activation": [..], "kept": [..], "message": 0.1}
  one number per stage, in the order of the model, for P or a multiple of P stages; the last four
  may be missing. backward: of a whole backward (else both halves together); activation: memory
  held from the start of F (else 1); kept: memory still held between I and W (else all of it)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is for auto alone."""
    parser.add_argument(
        "--stage-costs",
        type=stage_costs,
        metavar="JSON",
        help="for auto, instead of --costs: costs of stages that differ, see below",
    )
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="what auto makes short: the time from the first step of any rank to the last, or the "
        "longest of any one rank (default: makespan)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="then let OR-tools prove that plan of auto, or find a shorter one on the same layout: "
        "for small ones (pip install 'pipemega[solver]'); for as long again as --seconds at most",
    )
    parser.add_argument(
        "--seconds",
        type=limit,
        default=60.0,
        metavar="S",
        help="after which auto takes the best that it has found (default: 60, which is more than "
        "it takes for up to 16 ranks and 64 micro-batches)",
    )


def look_for(arguments: argparse.Namespace) -> Synthesis:
    """The plan that the arguments ask for.

    Without --memory-limit, ranks may hold as much as under 1F1B: P micro-batches.

    Raises:
        ScheduleError: a size or cost is none, or no plan can keep the limit.
    """
    layouts = _layouts(arguments)
    limit = arguments.memory_limit
    if limit is None:
        limit = arguments.pp * min(max(layout.least_memory) for layout in layouts)
    found = synthesize(
        layouts,
        arguments.microbatches,
        limit or None,
        objective=arguments.objective,
        seconds=arguments.seconds,
    )
    return prove(found, limit or None, seconds=arguments.seconds) if arguments.exact else found


def _layouts(arguments: argparse.Namespace) -> list[Layout]:
    chunks: int | None = arguments.chunks
    if arguments.stage_costs is None:
        counts = (1, 2, 4) if chunks is None else (chunks,)
        return layouts_of_shares(arguments.pp, arguments.costs, counts)
    costs: CostModel = arguments.stage_costs
    layouts = layouts_of_stages(arguments.pp, costs)
    if chunks not in (None, layouts[0].chunks):
        raise ScheduleError(
            f"--stage-costs are of {costs.num_stages} stages, {layouts[0].chunks} on each of "
            f"{arguments.pp} ranks, and --chunks is {chunks}: leave --chunks out"
        )
    return layouts


def text(found: Synthesis, costs: ShareCosts | None, objective: str) -> str:
    """The drawing and the figures of what was found.

    Args:
        costs: of a rank's share; None: those of stages were given.
        objective: what was to be short.
    """
    plan, timeline, chunks = found.plan, found.timeline, found.layout.chunks
    stages = f"{chunks} stages per rank ({_placement(found.layout)}), " if chunks > 1 else ""
    given = "costs per stage"
    if costs is not None:
        given = (
            f"F={costs.forward:g} I={costs.backward_input:g} W={costs.backward_weight:g} "
            f"c={costs.message:g} per rank's share"
        )
    reached = timeline.span if objective == "span" else timeline.makespan
    above = reached / found.bound - 1 if found.bound else 0.0
    gap = f"{above:.2%} above" if above > 1e-9 else "at"
    return "\n".join(
        (
            f"auto: {plan.num_ranks} ranks, {stages}{plan.num_microbatches} micro-batches; {given}",
            "",
            draw(timeline),
            "",
            f"makespan   {timeline.makespan:g}   (first step to last)",
            f"span       {timeline.span:g}   (the longest of any one rank, from its own first step "
            f"to its own last)",
            f"bubble     {timeline.bubble:.2%}",
            f"memory     {peaks(timeline.peak)} held at most, by rank",
            f"bound      {found.bound:g}   (no plan has a shorter {objective} within this memory; "
            f"this one is {gap} it)",
            f"made from  {found.source}",
        )
    )


def peaks(held: Sequence[float], most: int = 16) -> str:
    """What each rank holds, in one line."""
    words = [f"{peak:g}" for peak in held]
    if len(words) > most:
        words[most:] = [f".. (the highest: {max(held):g})"]
    return " ".join(words)


def stage_costs(text: str) -> CostModel:
    """The costs in `text`, JSON or the path of a file with JSON.

    Raises:
        argparse.ArgumentTypeError: it is neither, or no costs.
    """
    try:
        written = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"neither JSON nor a file with it: {error}") from error
    known = [field.name for field in fields(CostModel)]
    needed = known[:3]
    if not isinstance(written, dict) or not set(needed) <= set(written) <= set(known):
        found = ", ".join(written) if isinstance(written, dict) else type(written).__name__
        raise argparse.ArgumentTypeError(
            f"costs of stages have the keys {', '.join(needed)}, and any of "
            f"{', '.join(known[3:])}, not {found}"
        )
    for key, value in written.items():
        numbers = [value] if key == "message" else value
        if not isinstance(numbers, list) or not all(map(_is_number, numbers)) or not numbers:
            raise argparse.ArgumentTypeError(
                f"{key} of the costs of stages: give "
                f"{'a number' if key == 'message' else 'a list of numbers, one per stage'}"
            )
    try:
        message = float(written.pop("message", 0.0))
        return CostModel(
            **{key: tuple(map(float, value)) for key, value in written.items()}, message=message
        )
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def limit(text: str) -> float:
    """A number above 0, from the command line."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return limit


def _is_number(value: object) -> bool:
    # bool is an int to Python, and true is no number of anything.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _placement(layout: Layout) -> str:
    ranks, homes = layout.num_ranks, layout.rank_of_stage
    return "in a v" if homes[ranks - 1] == homes[ranks] and ranks > 1 else "in a loop"
