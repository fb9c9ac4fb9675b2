"""Predict a run from its config: mesh, batch, stages, memory, bubble, time and messages of a step.

It needs no GPU, starts no process and allocates no memory for the model: each stage runs once on
torch's meta device, where tensors have shapes but no values, and all tensors are counted.

The memory is predicted for CUDA kernels, or for CPU kernels if mesh.device is "cpu". Times are
relative to the mean forward of a rank, by FLOPs; with --tflops or --costs they are in seconds.

The exit code is 1 if the run does not fit into --device-memory; the output then lists changes that
reduce memory, each with its result. It is 2, with one line on standard error, after an error.

  text       the whole report, for a terminal
  json       the same for scripts: sizes in bytes, times in seconds if they are known
"""

import argparse
import json
import shutil
from pathlib import Path

from pipemega.cli.run_options import Subparsers, add_command, add_config, positive_number
from pipemega.cli.schedule import FORMATS_HELP, add_figure_options, deliver, rank_costs, show
from pipemega.config import load
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.planning.advice import advise
from pipemega.planning.estimate import Request, estimate
from pipemega.planning.prediction import Rates
from pipemega.planning.report import as_json, as_text, report_intro, report_panels
from pipemega.printing import parse_bytes

_EPILOG = """\
your own model: --model MODULE:FUNCTION, where FUNCTION(micro_batch_size) returns (PipelineModule,
inputs, labels) for one micro-batch; it is called under torch.device("meta")

examples:
  python -m pipemega plan configs/gpt_1.3b_tp2_pp4.json --device-memory H100-80GB
  python -m pipemega plan configs/llama_7b_tp4_pp4.json --world 32 --compare all --tflops 400
  python -m pipemega plan ds.json --model my_model:build --set mesh.pipeline=4
"""

_PAGE_HELP = """\
  With --compare, pictures show all compared schedules. The page starts with the verdict and the
  memory of each rank; without --compare it compares all schedules, and draws the
  schedule of the config and the best alternative.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `plan`."""
    description = f"{__doc__}{FORMATS_HELP}{_PAGE_HELP}"
    parser = add_command(subparsers, "plan", description, _EPILOG)
    add_config(parser)
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="your own model, see below")
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of a device: 80GB, 79.2GiB, or a device name that ends in it, e.g. H100-80GB",
    )
    parser.add_argument(
        "--compare",
        metavar="NAMES",
        help=f"compare with other schedules: 'all', or some of {', '.join(SCHEDULES)}",
    )
    parser.add_argument(
        "--tflops", type=positive_number, metavar="X", help="TFLOP/s that a device achieves"
    )
    parser.add_argument(
        "--link",
        type=positive_number,
        metavar="GB/s",
        help="bandwidth between pipeline ranks; needs --tflops",
    )
    parser.add_argument(
        "--costs",
        type=rank_costs,
        metavar="F,I,W,c",
        help="seconds that one rank needs for forward, input gradient and weight gradient of a "
        "micro-batch, and for a message",
    )
    add_figure_options(parser, ("text", "json"))
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit code: 1 if the run does not fit, else 0.

    Raises:
        PipemegaError: the config cannot run, or an argument is wrong.
    """
    memory = arguments.device_memory
    config = load(arguments.config, arguments.overrides)
    compare = tuple((arguments.compare or "").replace(",", " ").split())
    draws_all = bool(compare)
    if arguments.format == "html" and not compare and config.mesh.pipeline > 1:
        compare = tuple(SCHEDULES)  # the page names the best alternative
    request = Request(
        config=config,
        world=arguments.world,
        model=arguments.model,
        limit=None if memory is None else parse_bytes(memory),
        rates=Rates.of(arguments.costs, arguments.tflops, arguments.link, memory),
        compare=compare,
        # A size in bytes names no device.
        device_name=memory if memory and "-" in memory else "H100",
    )
    report = estimate(request)
    changes = advise(report)
    if arguments.format == "json":
        deliver(json.dumps(as_json(report, changes), indent=2) + "\n", arguments.output)
    elif arguments.format == "text":
        width = shutil.get_terminal_size((80, 24)).columns
        deliver(as_text(report, changes, width) + "\n", arguments.output)
    else:
        if arguments.unit == "units":
            arguments.unit = "s" if request.rates.known else "mean forwards"
        name = Path(arguments.config).stem
        panels, memory_unit = report_panels(report, only_marked=not draws_all)
        intro = report_intro(report, changes, name)
        show(arguments, panels, f"{name}.plan", intro=intro, memory_unit=memory_unit)
    return 1 if report.fits is False else 0
