"""`python -m pipemega plan`: what a config will do, before anything is started."""

import argparse
import json
import shutil
from pathlib import Path

from pipemega.cli.pictures import FORMATS, FORMATS_HELP, add_options, deliver, show
from pipemega.cli.run_options import add_config
from pipemega.config import load
from pipemega.pipeline.schedules import SCHEDULES, ShareCosts
from pipemega.planning.advice import recommendation, warnings_of, ways_to_fit
from pipemega.planning.panels import panels_of, tables_of
from pipemega.planning.quantities import parse_bytes
from pipemega.planning.rates import Rates
from pipemega.planning.report import Request, as_json, draw_up
from pipemega.planning.text import as_text

_DESCRIPTION = f"""\
Shows what a config will do: mesh, batch, stages, memory of each rank, bubble, time and traffic of a
step. Needs no GPU, starts no process, and takes no memory for the model: its stages run once on
torch's meta device, where tensors have shapes and no numbers, and what they keep is counted.

Memory is that of the kernels of CUDA, or of a CPU if mesh.device is "cpu". Time is relative to a
rank's mean forward by FLOPs, unless --tflops or --costs say more.

Exit code 1 if it does not fit into --device-memory, and then what would help, each tried;
2 and one line on standard error if anything is wrong.

  text       everything, for a terminal
  json       the same with sizes in bytes, and times in seconds where they are known
{FORMATS_HELP}  With --compare, pictures show the schedules one above the other.
"""

_EPILOG = """\
a model of your own: --model MODULE:FUNCTION, where FUNCTION(micro_batch_size) returns
(PipelineModule, inputs, labels) of one micro-batch; it is called under torch.device("meta")

examples:
  python -m pipemega plan configs/gpt_1.3b_tp2_pp4.json --device-memory H100-80GB
  python -m pipemega plan configs/llama_7b_tp4_pp4.json --world 32 --compare all --tflops 400
  python -m pipemega plan ds.json --model my_model:build --set mesh.pipeline=4
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="what a config will do: memory, bubble, time, and whether it fits",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="a model of your own, see below")
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="of one device: 80GB, 79.2GiB, or a name that ends in it, such as H100-80GB",
    )
    parser.add_argument(
        "--compare",
        metavar="NAMES",
        help=f"set other schedules beside it: 'all', or some of {', '.join(SCHEDULES)}",
    )
    parser.add_argument(
        "--tflops", type=_positive, metavar="X", help="TFLOP/s that a device achieves"
    )
    parser.add_argument(
        "--link", type=_positive, metavar="GB/s", help="between pipeline ranks, with --tflops"
    )
    parser.add_argument(
        "--costs",
        type=_costs,
        metavar="F,I,W,c",
        help="seconds of one rank's share of forward, input half and weight half of a "
        "micro-batch, and of a message",
    )
    parser.add_argument(
        "--format", choices=("text", "json", *FORMATS), default="text", help="(default: text)"
    )
    add_options(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; 1 if it does not fit, else 0.

    Raises:
        PipemegaError: the config cannot be run, or a word of the command is wrong.
    """
    memory = arguments.device_memory
    request = Request(
        config=load(arguments.config, arguments.overrides),
        world=arguments.world,
        model=arguments.model,
        limit=None if memory is None else parse_bytes(memory),
        rates=Rates(arguments.costs, arguments.tflops, arguments.link),
        compare=tuple((arguments.compare or "").replace(",", " ").split()),
    )
    report = draw_up(request)
    warnings, best = warnings_of(report), recommendation(report)
    ways = ways_to_fit(report) if report.fits is False else []
    if arguments.format == "json":
        advice = [best] if best else []
        advice += [f"{way.change}: {way.peak} bytes" for way in ways if way.fits]
        values = as_json(report, warnings, advice)
        deliver(json.dumps(values, indent=2) + "\n", arguments.output)
    elif arguments.format == "text":
        width = shutil.get_terminal_size((80, 24)).columns
        deliver(as_text(report, warnings, best, ways, width) + "\n", arguments.output)
    else:
        if arguments.unit == "units":
            arguments.unit = "s" if request.rates.known else "mean forwards"
        name = Path(arguments.config).stem
        panels, memory_unit = panels_of(report)
        tables = tables_of(report, warnings, best)
        show(arguments, panels, f"{name}.plan", name, tables, memory_unit=memory_unit)
    return 1 if report.fits is False else 0


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def _costs(text: str) -> ShareCosts:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not all(0 <= n < float("inf") for n in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give three or four times in seconds, F,I,W or F,I,W,c, as in .1,.1,.1,.01"
        )
    return ShareCosts(*numbers)
