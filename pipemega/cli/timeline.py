"""`python -m pipemega timeline`: a step as it was measured, beside what was to be expected."""

import argparse
from pathlib import Path

from pipemega.cli.pictures import FORMATS, deliver
from pipemega.errors import ConfigError
from pipemega.pipeline.comparison import Comparison, compare
from pipemega.pipeline.trace import Trace

_DESCRIPTION = """\
Shows a timeline that a run has measured: training writes one at each step that monitor.trace names,
as timelines/step-N.json in the folder of the run. Beside it stands the same plan as the simulator
plays it with the costs that were measured.

  text       both drawn, with makespan, span, bubble and memory; what each rank did and waited for;
             what the steps of each stage cost
  png, svg   both as a picture (needs matplotlib: pip install 'pipemega[pictures]')
  html       both as a page of its own: point at a step, and it says what it is
  trace      a Chrome trace, for ui.perfetto.dev
"""
_EXAMPLE = "example: python -m pipemega timeline runs/latest/timelines/step-10.json --format html"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `timeline`."""
    parser = subparsers.add_parser(
        "timeline",
        help="look at a step that a run has measured",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="step-N.json of a run")
    parser.add_argument(
        "--format", choices=("text", *FORMATS), default="text", help="(default: text)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="where to write (default: beside FILE; text to the terminal)",
    )
    parser.add_argument(
        "--width", type=int, default=120, help="of the drawings in text (default: %(default)s)"
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the timeline, or writes it to a file, and returns the exit code.

    Raises:
        ScheduleError: the file is no measured timeline.
        ConfigError: it cannot be read; the picture cannot be drawn here, or not be written there.
    """
    file: Path = arguments.file
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the timeline {str(file)!r} cannot be read: {error}") from error
    shown = compare(Trace.from_json(text))
    if arguments.format == "text":
        deliver(shown.text(arguments.width) + "\n", arguments.output)
    else:
        ending = "trace.json" if arguments.format == "trace" else arguments.format
        deliver(_drawn(shown, arguments.format), arguments.output or file.with_suffix(f".{ending}"))
    return 0


def _drawn(shown: Comparison, form: str) -> bytes | str:
    if form == "png":
        return shown.png()
    if form == "svg":
        return shown.svg()
    return shown.html() if form == "html" else shown.chrome_trace()
