"""Show a measured timeline next to a simulation of the same plan with the measured costs.

Training writes a timeline at each step listed in monitor.trace, as timelines/step-N.json in the run
folder.

  text       both timelines; makespan, span, bubble and memory; busy and wait time of each rank;
             costs of each stage
  png, svg   both timelines as a picture (needs matplotlib: pip install -e '.[pictures]')
  html       both timelines as one self-contained page: select a step to see its details
  trace      a Chrome trace, for ui.perfetto.dev
"""

import argparse
from pathlib import Path

from pipemega.cli.run_options import Subparsers, add_command
from pipemega.cli.schedule import deliver, deliver_text, text_width
from pipemega.errors import ConfigError
from pipemega.pipeline.visualize import FORMATS
from pipemega.profiling.measured_costs import compare
from pipemega.profiling.step_trace import Trace

_EXAMPLE = "example: python -m pipemega timeline runs/latest/timelines/step-10.json --format html"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `timeline`."""
    parser = add_command(subparsers, "timeline", __doc__, _EXAMPLE)
    parser.add_argument("file", type=Path, metavar="FILE", help="timelines/step-N.json of a run")
    parser.add_argument(
        "--format", choices=("text", *FORMATS), default="text", help="(default: text)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="output file (default: next to FILE; text to the terminal)",
    )
    parser.add_argument(
        "--width",
        type=int,
        help="width of text timelines (default: the width of the terminal; 120 if there is none)",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the timeline, or write it to a file, and return the exit code.

    Raises:
        ScheduleError: the file is not a measured timeline.
        ConfigError: the file cannot be read, matplotlib is missing, or the output cannot be
            written.
    """
    file: Path = arguments.file
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the timeline {str(file)!r} cannot be read: {error}") from error
    comparison, form = compare(Trace.from_json(text)), arguments.format
    if form == "text":
        width = arguments.width or text_width(arguments.output)
        deliver_text(comparison.text(width), arguments.output)
    else:
        output = arguments.output or file.with_suffix(f".{FORMATS[form]}")
        deliver(comparison.render(form), output)
    return 0
