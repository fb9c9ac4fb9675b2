"""Build a pipeline schedule for any number of ranks, and print or draw it.

The command proves that the schedule is complete and cannot deadlock over gloo and NCCL. It needs no
GPU and starts no process.

formats:
  text   a drawing with one row per rank and time from left to right, then makespan, bubble and
         memory. F3 and B3: forward and backward of micro-batch 3; I3 and W3: the input-gradient
         and weight-gradient half of its backward; small letters: the second stage of a rank;
         --: the step continues; ..: the rank waits
  json   {"name", "num_microbatches", "rank_of_stage": [...], "programs": [["F0@0", ...], ...]},
         one program per rank; F0@0 is the forward of micro-batch 0 at stage 0
  csv    one row per rank, in the format of torch.distributed.pipelining: 0F0 is stage 0,
         forward, micro-batch 0
"""

import argparse
import textwrap

from pipemega.cli import autoschedule
from pipemega.cli.figure_output import (
    FORMATS_HELP,
    add_options,
    deliver,
    deliver_text,
    show,
    text_width,
)
from pipemega.cli.run_options import Subparsers, add_command
from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.plan.validate import validate_messages
from pipemega.pipeline.schedules import (
    AUTO,
    SCHEDULES,
    RankCosts,
    ScheduleFamily,
    Sizes,
    build_plan,
    find_schedule,
)
from pipemega.pipeline.visualize import FORMATS, Panel
from pipemega.pipeline.visualize.text import draw_text
from pipemega.printing import percent

_NAMES = textwrap.fill("schedules: " + ", ".join(SCHEDULES), 79, break_on_hyphens=False)
_AUTO = """\
auto: searches for the best plan for the given costs within --memory-limit, on 1, 2 or 4 stages per
rank (or --chunks); takes some seconds for 8 ranks
"""
_EXAMPLES = """\
examples:
  python -m pipemega schedule 1f1b --pp 4 --microbatches 8 --costs 1,1,1,.1
  python -m pipemega schedule auto --pp 4 --microbatches 8 --costs 1,1.2,.8,.1 --memory-limit 3
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `schedule`."""
    epilog = "\n".join((_NAMES, "", _AUTO, autoschedule.STAGE_COSTS, _EXAMPLES))
    parser = add_command(subparsers, "schedule", f"{__doc__}{FORMATS_HELP}", epilog)
    parser.add_argument(
        "name", metavar="NAME", help="name of a schedule, or auto; see the list below"
    )
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="micro-batches per step"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="stages per rank (default: that of the schedule)"
    )
    parser.add_argument(
        "--costs",
        type=_costs,
        default=RankCosts(),
        metavar="F,I,W,c",
        help="times of forward, input gradient and weight gradient of one micro-batch in all "
        "stages of one rank together, and of a message between ranks, in any unit "
        "(default: 1,1,1,0)",
    )
    parser.add_argument(
        "--memory-limit",
        type=autoschedule.limit,
        metavar="K",
        help="limit of the activation memory of each rank, in micro-batches, or in the unit of "
        "--stage-costs (default: none for a named schedule; for auto P micro-batches, as 1f1b)",
    )
    autoschedule.add_options(parser)
    add_options(parser, ("text", "json", "csv"))
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the schedule, or write it to a file; return the exit code.

    Raises:
        ScheduleError: unknown schedule, or one that does not accept these sizes or this memory.
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if arguments.name == AUTO:
        found = autoschedule.search(arguments)
        costs = arguments.costs if arguments.stage_costs is None else None
        width = text_width(arguments.output)
        text = autoschedule.text(found, costs, arguments.objective, width)
        return _show(arguments, Panel(found.timeline, costs=found.placement.costs), text)
    if arguments.stage_costs is not None:
        raise ScheduleError(f"--stage-costs is for auto, not for {arguments.name!r}: use --costs")
    family = find_schedule(arguments.name)
    plan = build_plan(family.name, arguments.pp, arguments.microbatches, arguments.chunks)
    _check_memory(plan, arguments)
    sizes = Sizes(arguments.pp, arguments.microbatches, plan.num_stages // plan.num_ranks)
    stage_costs = CostModel.from_rank_costs(plan.rank_of_stage, *arguments.costs)
    timeline = simulate(plan, stage_costs)
    text = _text(family, sizes, timeline, arguments)
    return _show(arguments, Panel(timeline, costs=stage_costs), text)


def _show(arguments: argparse.Namespace, panel: Panel, text: str) -> int:
    plan = panel.timeline.plan
    validate_messages(lower(plan), "queues")
    if arguments.format == "json":
        deliver(plan.to_json() + "\n", arguments.output)
    elif arguments.format == "csv":
        deliver(plan.to_csv(), arguments.output)
    elif arguments.format in FORMATS:
        unit = "micro-batches" if arguments.stage_costs is None else "units"
        show(arguments, [panel], plan.name, memory_unit=unit)
    else:
        deliver_text(text, arguments.output)
    return 0


def _check_memory(plan: Plan, arguments: argparse.Namespace) -> None:
    """Raise ScheduleError if a named schedule exceeds --memory-limit."""
    limit = arguments.memory_limit
    if limit is None:
        return
    held = simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage)).peak
    if max(held) > limit * (1 + 1e-9):
        raise ScheduleError(
            f"schedule {plan.name!r} holds {max(held):g} micro-batches on rank "
            f"{held.index(max(held))}, and --memory-limit is {limit:g}: raise the limit, or use "
            f"schedule 'auto'"
        )


def _text(
    family: ScheduleFamily, sizes: Sizes, timeline: Timeline, arguments: argparse.Namespace
) -> str:
    costs: RankCosts = arguments.costs
    stages = f"{sizes.chunks} stages per rank, " if sizes.chunks > 1 else ""
    by_formula = f", {percent(family.bubble(sizes, costs), 2)} by the formula"
    if not family.exact(sizes, costs):
        by_formula = f"; the formula is exact only if {family.exact}"
    return "\n".join(
        (
            f"{family.name}: {sizes.pp_size} ranks, {stages}{sizes.num_microbatches} "
            f"micro-batches; "
            f"F={costs.forward:g} I={costs.backward_input:g} W={costs.backward_weight:g} "
            f"c={costs.message:g} per rank   ({family.source})",
            "",
            draw_text(timeline, text_width(arguments.output)),
            "",
            f"makespan   {timeline.makespan:g}   (from the first instruction to the last; formula: "
            f"{family.makespan})",
            f"span       {timeline.span:g}   (longest time of a rank, from its own first "
            f"instruction to its own last)",
            f"bubble     {percent(timeline.bubble, 2)} simulated{by_formula}",
            f"memory     {autoschedule.peaks(timeline.peak)} micro-batches held at most, per rank "
            f"(formula: {family.peak})",
        )
    )


def _costs(text: str) -> RankCosts:
    parts = text.split(",")
    try:
        costs = RankCosts(*map(float, parts))
    except (ValueError, TypeError):
        parts = []
    if len(parts) not in (3, 4):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give three or four numbers, F,I,W or F,I,W,c, as in 1,1,1,0.1"
        )
    try:
        CostModel.from_rank_costs((0,), *costs)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return costs
