"""`python -m pipemega config`: the config's own documentation, made from the code."""

import argparse
import json
from collections.abc import Callable, Mapping

from pipemega.config.reference import deepspeed_page, reference_page, schema

_PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "schema": (
        "the JSON Schema, for completion and checks in an editor",
        lambda: json.dumps(schema(), indent=2) + "\n",
    ),
    "docs": ("the reference page, which is docs/config.md", reference_page),
    "deepspeed": (
        "what becomes of each key of DeepSpeed's, which is docs/deepspeed.md",
        deepspeed_page,
    ),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `config`."""
    parser = subparsers.add_parser(
        "config",
        help="the JSON Schema and the reference page of the config",
        description="Prints what the config may say.",
        epilog="example: python -m pipemega config schema > pipemega.schema.json",
    )
    pages = parser.add_subparsers(title="pages", metavar="PAGE", required=True)
    for name, (text, _) in _PAGES.items():
        page = pages.add_parser(name, help=text, description=f"Prints {text}.")
        page.set_defaults(func=run, page=name)


def run(arguments: argparse.Namespace) -> int:
    """Prints the page and returns 0."""
    _, make = _PAGES[arguments.page]
    print(make(), end="")
    return 0
