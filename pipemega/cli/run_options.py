"""Options of the commands that are about a run: its config, its ranks, what is laid over."""

import argparse


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds CONFIG, --world and --set (as `overrides`)."""
    parser.add_argument("config", metavar="CONFIG", help="the JSON file")
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="number of ranks (default: the fewest that the config can run on)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="write over a key, such as pipeline.schedule=gpipe; repeatable",
    )
