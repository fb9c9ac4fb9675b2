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
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from pipemega.cli.run_options import Subparsers, add_command
from pipemega.errors import ConfigError, ScheduleError
from pipemega.pipeline.autoschedule import (
    AutoPlan,
    Placement,
    find_plan,
    limit_of_1f1b,
    placements_of_rank_costs,
    placements_of_stage_costs,
)
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, Timeline, simulate
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
from pipemega.pipeline.visualize import FORMATS, Intro, Panel, render
from pipemega.pipeline.visualize.text import draw_text
from pipemega.printing import line_width, percent, print_report

STAGE_COSTS = """\
--stage-costs: a JSON object, or the path of a file that contains one:
  {"forward": [1, 1, 1, 1.4], "backward_input": [1, 1, 1, 1.5], "backward_weight": [1, 1, 1, 1.2],
   "backward": [..], "activation": [..], "kept": [..], "message": 0.1}
  One number per stage, in the order of the model, for P stages or a multiple of P. The last four
  are optional. backward: time of a whole backward (default: backward_input + backward_weight);
  activation: memory held from the start of F (default: 1); kept: memory held between I and W
  (default: the same as activation).
"""


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


def positive(text: str) -> float:
    """Return the number in `text`, which must be above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def _is_number(value: object) -> bool:
    # In Python bool is an int, but true is not a valid number here.
    return isinstance(value, int | float) and not isinstance(value, bool)


# Width of drawings in text that is not written to a terminal.
_WIDE: Final = 120

FORMATS_HELP: Final = """\
  png, svg   a picture (needs matplotlib: pip install -e '.[pictures]')
  html       one self-contained page: zoom to warm-up, steady phase and cool-down; select an
             instruction to see its times, its wait and the memory of its rank
  trace      a Chrome trace, for ui.perfetto.dev
"""


def add_figure_options(parser: argparse.ArgumentParser, text_formats: Sequence[str]) -> None:
    """Add `--format`, `--output`, `--unit` and `--memory`.

    Args:
        text_formats: values of `--format` besides the picture formats; the first is the default.
    """
    parser.add_argument(
        "--format",
        choices=(*text_formats, *FORMATS),
        default=text_formats[0],
        help="output format (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="output file (default: NAME.png, NAME.html and so on; text formats to the terminal)",
    )
    parser.add_argument(
        "--unit", default="units", help="name of the unit of time, e.g. ms (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="png and svg: also draw the memory of each rank"
    )
    parser.add_argument("--dark", action="store_true", help="png and svg: on a dark background")


def show(
    arguments: argparse.Namespace,
    panels: Sequence[Panel],
    name: str,
    *,
    intro: Intro | None = None,
    memory_unit: str = "micro-batches",
) -> None:
    """Draw `panels` in the format `arguments.format`, to `arguments.output` or the file `name`.

    Args:
        intro: the introduction of the HTML page.
        memory_unit: name of the unit of memory.

    Raises:
        ConfigError: matplotlib is needed but not installed, or the file cannot be written.
    """
    content = render(
        arguments.format,
        panels,
        unit=arguments.unit,
        memory=arguments.memory,
        memory_unit=memory_unit,
        dark=arguments.dark,
        intro=intro,
    )
    deliver(content, arguments.output or Path(f"{name}.{FORMATS[arguments.format]}"))


def text_width(output: Path | None) -> int:
    """Return the width of a drawing in a text report: the width of the terminal, else 120."""
    return _WIDE if output else line_width(sys.stdout, _WIDE)


def deliver_text(text: str, output: Path | None) -> None:
    """Write a text report as `deliver` does; on a terminal its lines are wrapped.

    Raises:
        ConfigError: the file cannot be written.
    """
    if output is None:
        print_report(text)
    else:
        deliver(f"{text}\n", output)


def deliver(content: bytes | str, output: Path | None) -> None:
    """Write `content` to the file and print its size; without a file, print `content`.

    Raises:
        ConfigError: the file cannot be written.
    """
    if output is None:
        sys.stdout.write(str(content))
        return
    written = content if isinstance(content, bytes) else content.encode()
    try:
        output.write_bytes(written)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    print(f"{output}: {len(written):,} bytes")


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
    epilog = "\n".join((_NAMES, "", _AUTO, STAGE_COSTS, _EXAMPLES))
    parser = add_command(subparsers, "schedule", f"{__doc__}{FORMATS_HELP}", epilog)
    parser.add_argument(
        "name", metavar="NAME", help="name of a schedule, or auto; see the list below"
    )
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="micro-batches per step"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="stages per rank (default: the schedule's number)"
    )
    parser.add_argument(
        "--costs",
        type=rank_costs,
        default=RankCosts(),
        metavar="F,I,W,c",
        help="times of forward, input gradient and weight gradient of one micro-batch in all "
        "stages of one rank together, and of a message between ranks, in any unit "
        "(default: 1,1,1,0)",
    )
    parser.add_argument(
        "--memory-limit",
        type=positive,
        metavar="K",
        help="limit of the activation memory of each rank, in micro-batches, or in the unit of "
        "--stage-costs (default: none for a named schedule; for auto P micro-batches, as 1f1b)",
    )
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
        type=positive,
        default=60.0,
        metavar="S",
        help="auto only: time limit of the search (default: 60, enough for 16 ranks and 64 "
        "micro-batches)",
    )
    add_figure_options(parser, ("text", "json", "csv"))
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the schedule, or write it to a file; return the exit code.

    Raises:
        ScheduleError: unknown schedule, or one that does not accept these sizes or this memory.
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if arguments.name == AUTO:
        found = search(arguments)
        panel = Panel(found.timeline, costs=found.placement.costs)
        return _show(arguments, panel, *_search_text(found, arguments))
    if arguments.stage_costs is not None:
        raise ScheduleError(f"--stage-costs is for auto, not for {arguments.name!r}: use --costs")
    family = find_schedule(arguments.name)
    plan = build_plan(family.name, arguments.pp, arguments.microbatches, arguments.chunks)
    _check_memory(plan, arguments)
    stage_costs = CostModel.from_rank_costs(plan.rank_of_stage, *arguments.costs)
    timeline = simulate(plan, stage_costs)
    return _show(arguments, Panel(timeline, costs=stage_costs), *_text(family, timeline, arguments))


def _show(arguments: argparse.Namespace, panel: Panel, head: str, rows: Mapping[str, str]) -> int:
    """Print the plan of `panel`, or write it to a file.

    Args:
        head: the line above the drawing of a text.
        rows: the figures below the drawing.
    """
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
        drawing = draw_text(panel.timeline, text_width(arguments.output))
        lines = (f"{name:<11}{value}" for name, value in rows.items())
        deliver_text("\n".join((head, "", drawing, "", *lines)), arguments.output)
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
    family: ScheduleFamily, timeline: Timeline, arguments: argparse.Namespace
) -> tuple[str, dict[str, str]]:
    """Return the line above the drawing of a named schedule, and the figures below it."""
    plan, costs = timeline.plan, arguments.costs
    sizes = Sizes(plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks)
    stages = f"{sizes.chunks} stages per rank, " if sizes.chunks > 1 else ""
    by_formula = f", {percent(family.bubble(sizes, costs), 2)} by the formula"
    if not family.exact(sizes, costs):
        by_formula = f"; the formula is exact only if {family.exact}"
    return f"{_head(family.name, plan, stages, costs)}   ({family.source})", _rows(
        timeline,
        f"; formula: {family.makespan}",
        f" simulated{by_formula}",
        f"micro-batches held at most, per rank (formula: {family.peak})",
    )


def _search_text(found: AutoPlan, arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the line above the drawing of a found plan, and the figures below it."""
    timeline, place, objective = found.timeline, found.placement, arguments.objective
    stages = ""
    if place.chunks > 1:
        ranks, rank_of_stage = place.num_ranks, place.rank_of_stage
        is_v = rank_of_stage[ranks - 1] == rank_of_stage[ranks] and ranks > 1
        stages = f"{place.chunks} stages per rank ({'in a v' if is_v else 'in a loop'}), "
    costs = arguments.costs if arguments.stage_costs is None else None
    reached = timeline.span if objective == "span" else timeline.makespan
    above = reached / found.bound - 1 if found.bound else 0.0
    gap = f"{percent(above, 2)} above" if above > 1e-9 else "at"
    rows = _rows(timeline, "", "", "held at most, per rank")
    rows["bound"] = (
        f"{found.bound:g}   (lower limit of the {objective} within this memory; this plan is {gap} "
        f"it)"
    )
    rows["origin"] = found.source
    return _head(AUTO, found.plan, stages, costs), rows


def _head(name: str, plan: Plan, stages: str, costs: RankCosts | None) -> str:
    given = "costs per stage"
    if costs is not None:
        given = (
            f"F={costs.forward:g} I={costs.backward_input:g} W={costs.backward_weight:g} "
            f"c={costs.message:g} per rank"
        )
    return f"{name}: {plan.num_ranks} ranks, {stages}{plan.num_microbatches} micro-batches; {given}"


def _rows(timeline: Timeline, makespan: str, bubble: str, memory: str) -> dict[str, str]:
    """Return the figures of any plan; the other arguments are added to their texts."""
    return {
        "makespan": f"{timeline.makespan:g}   (from the first instruction to the last{makespan})",
        "span": f"{timeline.span:g}   (longest time of a rank, from its own first instruction to "
        f"its own last)",
        "bubble": f"{percent(timeline.bubble, 2)}{bubble}",
        "memory": f"{peaks(timeline.peak)} {memory}",
    }


def rank_costs(text: str) -> RankCosts:
    """Return the costs in `text`: F,I,W or F,I,W,c.

    Raises:
        argparse.ArgumentTypeError: not three or four numbers, or one is negative or not finite.
    """
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
