"""`pipemega config`: print the JSON Schema, the reference pages, and configs of other engines."""

import argparse
import json
from collections.abc import Callable, Mapping

from pipemega.cli.from_deepspeed import add_from_deepspeed
from pipemega.cli.from_megatron import add_from_megatron
from pipemega.cli.run_options import Subparsers
from pipemega.compat.megatron.argument_page import argument_page
from pipemega.config import examine
from pipemega.config.reference_pages import deepspeed_page, reference_page, schema

_PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "schema": (
        "the JSON Schema, for completion and checks in an editor",
        lambda: json.dumps(schema(), indent=2) + "\n",
    ),
    "docs": ("the config reference, docs/config.md", reference_page),
    "deepspeed": ("the list of DeepSpeed keys, docs/deepspeed.md", deepspeed_page),
    "megatron": ("the list of Megatron-LM arguments, docs/megatron.md", argument_page),
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `config`."""
    parser = subparsers.add_parser(
        "config",
        description="Print the JSON Schema or a reference page, or convert a run of DeepSpeed or "
        "Megatron-LM to a config.",
        epilog="example: pipemega config schema > pipemega.schema.json",
    )
    pages = parser.add_subparsers(title="pages", metavar="PAGE", required=True)
    for name, (text, _) in _PAGES.items():
        page = pages.add_parser(name, help=text, description=f"Print {text}.")
        page.set_defaults(func=run, page=name, config=None)
        if name == "schema":
            page.add_argument(
                "--config",
                metavar="FILE",
                help="a config with `imports`: the schema includes the types of these modules",
            )
    add_from_deepspeed(pages)
    add_from_megatron(pages)


def run(arguments: argparse.Namespace) -> int:
    """Print the page and return 0.

    Raises:
        ConfigError: a module of `imports` cannot be imported.
    """
    if arguments.config is not None:
        draft = examine(arguments.config)
        failed = [error for error in draft.errors if error.path == ("imports",)]
        if failed:
            raise draft.source.error(failed)
    _, make = _PAGES[arguments.page]
    print(make(), end="")
    return 0
