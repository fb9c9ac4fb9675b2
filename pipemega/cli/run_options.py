"""The parser of a command, and options of the commands that read a config or run a model."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from pipemega.lazy_imports import deferred

if TYPE_CHECKING:
    import tqdm

    from pipemega.distributed import mesh
    from pipemega.fault_tolerance import run
else:
    tqdm = deferred("tqdm")
    mesh = deferred("pipemega.distributed.mesh")
    run = deferred("pipemega.fault_tolerance.run")

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    subparsers: Subparsers, name: str, description: str, epilog: str, summary: str | None = None
) -> argparse.ArgumentParser:
    """Add a command whose --help prints `description` and `epilog` with their line breaks.

    Args:
        summary: the line about the command in the list of commands.
    """
    return subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, --world and --set (as `overrides`)."""
    parser.add_argument(
        "config", metavar="CONFIG", help="path of the config: JSON, JSON5 or Python (.py)"
    )
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="number of ranks (default: the smallest number that fits the config)",
    )
    add_overrides(parser, "override a key, for example pipeline.schedule=gpipe")


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --set (as `overrides`).

    Args:
        what: the help text, without its end "; repeatable".
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"{what}; repeatable",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add CHECKPOINT, --tag, --set (as `overrides`), --json and --verbose."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of checkpoints, or of a Hugging Face model"
    )
    parser.add_argument("--tag", help="the checkpoint in the folder; default: the newest")
    add_overrides(parser, "change a key of the config in the checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON values, for scripts")
    parser.add_argument("--verbose", action="store_true", help="print the log of the ranks")


@contextmanager
def launched(arguments: argparse.Namespace) -> Iterator[None]:
    """Run the body on all launched ranks; with several, an error ends all with one message.

    Without --verbose only warnings are logged. Several ranks exit without the teardown of the
    interpreter: a thread of torch that needs the interpreter at that moment would abort a rank, and
    torchrun would report an error after the result.
    """
    has_ranks = mesh.launched_world_size() > 1
    disabled = logging.root.manager.disable
    if not arguments.verbose:
        logging.disable(max(disabled, logging.INFO))
    try:
        with run.run() if has_ranks else nullcontext():
            yield
        if has_ranks:
            run.skip_teardown(0)
    finally:
        logging.disable(disabled)


@contextmanager
def progress(
    total: int | None, unit: str, name: str = "", shows: bool = True
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal; give the function that gets how much more is done.

    Args:
        unit: "B" for bytes, else a noun.
        shows: whether this rank shows it.
    """
    with tqdm.tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        desc=name or None,
        leave=False,
        disable=not (shows and sys.stderr.isatty()),
    ) as bar:
        yield bar.update


def positive_count(text: str) -> int:
    """Return an option's number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)


def positive_number(text: str) -> float:
    """Return an option's number, above 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number")
    return number
