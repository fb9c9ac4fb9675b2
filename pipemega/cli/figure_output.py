"""Options of the commands that draw timelines, and the function that writes their output."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipemega.errors import ConfigError
from pipemega.pipeline.visualize import FORMATS, Intro, Panel, render
from pipemega.printing import line_width, print_report

# Width of drawings in text that is not written to a terminal.
_WIDE: Final = 120

FORMATS_HELP: Final = """\
  png, svg   a picture (needs matplotlib: pip install -e '.[pictures]')
  html       one self-contained page: zoom to warm-up, steady phase and cool-down; select an
             instruction to see its times, its wait and the memory of its rank
  trace      a Chrome trace, for ui.perfetto.dev
"""


def add_options(parser: argparse.ArgumentParser, text_formats: Sequence[str]) -> None:
    """Add `--format`, `--output`, `--unit` and `--memory`.

    Args:
        text_formats: values of `--format` besides those of pictures; the first is the default.
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
        intro: of the HTML page.
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
    """Return the width for a drawing in a text report: that of the terminal, 120 elsewhere."""
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
