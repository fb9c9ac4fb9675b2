"""What commands that draw timelines share: their options, and where the picture goes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipemega.errors import ConfigError
from pipemega.pipeline.pictures import Panel, Table, html, png, svg, trace

FORMATS: Final = ("png", "svg", "html", "trace")
FORMATS_HELP: Final = """\
  png, svg   the drawing as a picture (needs matplotlib: pip install 'pipemega[pictures]')
  html       the drawing as a page of its own, for the phone too: point at a step, and it says what
             it is, when it ran, what it waited for and what its rank held; zoom, memory, figures
  trace      a Chrome trace, for ui.perfetto.dev
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--output`, `--unit` and `--memory`."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write (default: pictures to NAME.png and so on, all else to the terminal)",
    )
    parser.add_argument(
        "--unit", default="units", help="of the times in pictures, as in ms (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="in png and svg, also what each rank holds over time"
    )


def show(
    arguments: argparse.Namespace,
    panels: Sequence[Panel],
    name: str,
    title: str | None = None,
    tables: Sequence[Table] = (),
    *,
    memory_unit: str = "micro-batches",
) -> None:
    """Draws `panels` as `arguments.format` says, into `arguments.output` or a file named `name`.

    Args:
        title, tables: of the page in HTML.
        memory_unit: of what is held.

    Raises:
        ConfigError: matplotlib is wanted and missing, or the file cannot be written.
    """
    unit, memory = arguments.unit, arguments.memory
    content: bytes | str
    if arguments.format == "png":
        content = png(panels, unit=unit, memory=memory, memory_unit=memory_unit)
    elif arguments.format == "svg":
        content = svg(panels, unit=unit, memory=memory, memory_unit=memory_unit)
    elif arguments.format == "html":
        content = html(panels, unit=unit, memory_unit=memory_unit, title=title, tables=tables)
    else:
        content = trace(panels, unit=unit)
    ending = "trace.json" if arguments.format == "trace" else arguments.format
    deliver(content, arguments.output or Path(f"{name}.{ending}"))


def deliver(content: bytes | str, output: Path | None) -> None:
    """Into the file, and says so; without one, to the terminal.

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
