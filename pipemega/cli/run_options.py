"""The parser of a command, and options of the commands that read the config of a run."""

import argparse
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    subparsers: Subparsers, name: str, description: str, epilog: str, summary: str | None = None
) -> argparse.ArgumentParser:
    """Add a command whose --help prints `description` and `epilog` with their line breaks.

    Args:
        summary: for the list of commands.
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
        what: for the help, without the end "; repeatable".
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"{what}; repeatable",
    )
