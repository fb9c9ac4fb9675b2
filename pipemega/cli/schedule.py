"""`python -m pipemega schedule`: a schedule on paper, drawn, timed, or as a file."""

import argparse
import textwrap

from pipemega.cli import auto
from pipemega.cli.pictures import FORMATS, FORMATS_HELP, add_options, deliver, show
from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.pictures import Panel
from pipemega.pipeline.render import draw
from pipemega.pipeline.schedules import (
    SCHEDULES,
    SYNTHESIZED,
    ScheduleFamily,
    ShareCosts,
    Sizes,
    build_plan,
    find_schedule,
)
from pipemega.pipeline.simulate import Timeline, simulate
from pipemega.pipeline.validate import validate

_DESCRIPTION = f"""\
Builds a pipeline schedule for any number of ranks, proves that it is complete and cannot
deadlock, and shows it. Needs no GPU and starts no process.

  text   a drawing with ranks down and time across (F3 and B3: forward and backward of micro-batch
         3; I3 and W3: the two halves of its backward; small letters: the second stage of a rank;
         -- it goes on; .. the rank waits), makespan, bubble and memory
  json   {{"name", "num_microbatches", "rank_of_stage": [...], "programs": [["F0@0", ...], ...]}},
         one list per rank; F0@0 is the forward of micro-batch 0 at stage 0
  csv    one row per rank, as torch.distributed.pipelining writes schedules: 0F0 is stage 0,
         forward, micro-batch 0
{FORMATS_HELP}"""

_NAMES = textwrap.fill("schedules: " + ", ".join(SCHEDULES), 79, break_on_hyphens=False)
_AUTO = """\
auto: not a schedule that is written down, but the best that can be found for these costs within
--memory-limit, on any number of stages per rank (or --chunks); some seconds for 8 ranks
"""
_EXAMPLES = """\
examples:
  python -m pipemega schedule 1f1b --pp 4 --microbatches 8 --costs 1,1,1,.1
  python -m pipemega schedule auto --pp 4 --microbatches 8 --costs 1,1.2,.8,.1 --memory-limit 3
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `schedule`."""
    parser = subparsers.add_parser(
        "schedule",
        help="draw, time or export a pipeline schedule, on paper",
        description=_DESCRIPTION,
        epilog="\n".join((_NAMES, "", _AUTO, auto.STAGE_COSTS, _EXAMPLES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="one of those below")
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="micro-batches in a step"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="stages per rank (default: what the schedule has)"
    )
    parser.add_argument(
        "--costs",
        type=_costs,
        default=ShareCosts(),
        metavar="F,I,W,c",
        help="times of one rank's share of a micro-batch's forward, input-gradient and "
        "weight-gradient pass, and of a message between ranks, in any one unit "
        "(default: 1,1,1,0)",
    )
    parser.add_argument(
        "--memory-limit",
        type=auto.limit,
        metavar="K",
        help="the most that any rank may hold, in micro-batches of its share of the model, or in "
        "the units of --stage-costs (default: any for a named schedule, P micro-batches for auto, "
        "as 1f1b)",
    )
    auto.add_options(parser)
    parser.add_argument(
        "--format",
        choices=("text", "json", "csv", *FORMATS),
        default="text",
        help="(default: text)",
    )
    add_options(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the schedule, or writes it to a file, and returns the exit code.

    Raises:
        ScheduleError: there is no such schedule, or not for these sizes or this memory.
        ConfigError: the picture cannot be drawn here, or not be written there.
    """
    if arguments.name == SYNTHESIZED:
        found = auto.look_for(arguments)
        costs = arguments.costs if arguments.stage_costs is None else None
        text = auto.text(found, costs, arguments.objective)
        return _show(arguments, Panel(found.timeline, costs=found.layout.costs), text)
    if arguments.stage_costs is not None:
        raise ScheduleError(f"--stage-costs is for auto, not for {arguments.name!r}: use --costs")
    family = find_schedule(arguments.name)
    plan = build_plan(family.name, arguments.pp, arguments.microbatches, arguments.chunks)
    _check_memory(plan, arguments)
    sizes = Sizes(arguments.pp, arguments.microbatches, plan.num_stages // plan.num_ranks)
    stage_costs = CostModel.shared(plan.rank_of_stage, *arguments.costs)
    timeline = simulate(plan, stage_costs)
    text = _text(family, sizes, timeline, arguments.costs)
    return _show(arguments, Panel(timeline, costs=stage_costs), text)


def _show(arguments: argparse.Namespace, panel: Panel, text: str) -> int:
    plan = panel.timeline.plan
    validate(lower(plan))
    if arguments.format == "json":
        deliver(plan.to_json() + "\n", arguments.output)
    elif arguments.format == "csv":
        deliver(plan.to_csv(), arguments.output)
    elif arguments.format in FORMATS:
        unit = "micro-batches" if arguments.stage_costs is None else "units"
        show(arguments, [panel], plan.name, memory_unit=unit)
    else:
        deliver(text + "\n", arguments.output)
    return 0


def _check_memory(plan: Plan, arguments: argparse.Namespace) -> None:
    """Whether a named schedule keeps the limit, if there is one."""
    limit = arguments.memory_limit
    if limit is None:
        return
    held = simulate(plan, CostModel.shared(plan.rank_of_stage)).peak
    if max(held) > limit * (1 + 1e-9):
        raise ScheduleError(
            f"schedule {plan.name!r} holds {max(held):g} micro-batches on rank "
            f"{held.index(max(held))}, and --memory-limit is {limit:g}: give it as much, or use "
            f"schedule 'auto', which keeps a limit"
        )


def _text(family: ScheduleFamily, sizes: Sizes, timeline: Timeline, costs: ShareCosts) -> str:
    stages = f"{sizes.chunks} stages per rank, " if sizes.chunks > 1 else ""
    by_formula = f", {family.bubble(sizes, costs):.2%} by the formula"
    if not family.exact(sizes, costs):
        by_formula = f"; the formula is for {family.exact_formula}"
    return "\n".join(
        (
            f"{family.name}: {sizes.pp_size} ranks, {stages}{sizes.num_microbatches} "
            f"micro-batches; "
            f"F={costs.forward:g} I={costs.backward_input:g} W={costs.backward_weight:g} "
            f"c={costs.message:g} per rank's share   ({family.source})",
            "",
            draw(timeline),
            "",
            f"makespan   {timeline.makespan:g}   (first step to last; formula: "
            f"{family.makespan_formula})",
            f"span       {timeline.span:g}   (the longest of any one rank, from its own first step "
            f"to its own last)",
            f"bubble     {timeline.bubble:.2%} simulated{by_formula}",
            f"memory     {auto.peaks(timeline.peak)} micro-batches held at most, by rank (formula: "
            f"{family.peak_formula})",
        )
    )


def _costs(text: str) -> ShareCosts:
    parts = text.split(",")
    try:
        costs = ShareCosts(*map(float, parts))
    except (ValueError, TypeError):
        parts = []
    if len(parts) not in (3, 4):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give three or four numbers, F,I,W or F,I,W,c, as in 1,1,1,0.1"
        )
    try:
        CostModel.shared((0,), *costs)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return costs
