"""`pipemega hf check`."""

import argparse
import json
import logging
import warnings

from pipemega.cli.run_options import Subparsers, add_command
from pipemega.hf.hf_module import read_config
from pipemega.hf.placeholders import without_progress_bars
from pipemega.hf_check.check_report import report, table, titles_of, values
from pipemega.hf_check.model_check import check_model
from pipemega.hf_check.split_run import SplitSettings, prepare_ranks
from pipemega.printing import print_report

_CHECK = """\
Check that pipemega trains a Hugging Face model as transformers does, on the installed versions.

The config is shrunk: fewer layers, heads, experts and tokens, narrower. With random weights in
float64, transformers' own model computes loss and gradients in this process, and the split model
on P x T processes of this machine (gloo, no GPU). Every gradient is compared. The command also
checks that every layer of the full size can be split over T tensor ranks. It reads no weights.

Exit code 1: a loss or a gradient differs.
"""

_TABLE = """\
Measure what works for each family with the installed transformers: the table of the documentation.

Each cell compares loss and every gradient of a small model with transformers' own; this takes
several minutes.
"""

_EXAMPLE = """\
examples:
  python -m pipemega hf check models/llama-7b
  python -m pipemega hf check models/llama-7b --tensor 2 --pipeline 2 --schedule zb-v
"""


def add_check(commands: Subparsers) -> None:
    """Add the command `check`."""
    parser = add_command(
        commands, "check", _CHECK, _EXAMPLE, "compare the split model with transformers' own"
    )
    parser.add_argument("path", help="folder with config.json, or this file")
    parser.add_argument(
        "--pipeline", type=_size, default=2, metavar="P", help="pipeline ranks (default: 2)"
    )
    parser.add_argument(
        "--tensor", type=_size, default=1, metavar="T", help="tensor ranks (default: 1)"
    )
    parser.add_argument(
        "--schedule", default="1f1b", metavar="S", help="as pipeline.schedule (default: 1f1b)"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="as mesh.sequence_parallel"
    )
    parser.add_argument("--task", help="as model.task (default: from the config)")
    parser.add_argument("--attn-implementation", metavar="NAME", help="(default: transformers')")
    parser.add_argument("--json", action="store_true", help="print JSON values, for scripts")
    parser.set_defaults(func=_check)


def _check(arguments: argparse.Namespace) -> int:
    """Print the result; return 1 if something differs.

    Raises:
        ConfigError: the model cannot be split in this way.
    """
    # Imports transformers for the ranks while this process imports it for itself.
    prepare_ranks()
    split = SplitSettings(
        task=arguments.task,
        pipeline=arguments.pipeline,
        tensor=arguments.tensor,
        schedule=arguments.schedule,
        sequence_parallel=arguments.sequence_parallel,
        attn_implementation=arguments.attn_implementation,
    )
    with warnings.catch_warnings(), without_progress_bars():
        warnings.simplefilter("ignore")
        folder = arguments.path.removesuffix("/config.json")
        result = check_model(read_config(folder)[1], split)
    if arguments.json:
        print(json.dumps(values(result, split), indent=1))
    else:
        print_report("\n".join(report(result, split)))
    return 0 if result.is_equal else 1


def add_table(commands: Subparsers) -> None:
    """Add the command `table`."""
    parser = add_command(
        commands, "table", _TABLE, "", "measure what works for each family, as Markdown"
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="families to measure (default: all)"
    )
    parser.set_defaults(func=_table)


def _table(arguments: argparse.Namespace) -> int:
    """Print the table of docs/huggingface.md.

    Raises:
        ConfigError: a family is unknown.
    """
    titles = titles_of(arguments.families)
    prepare_ranks()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), without_progress_bars():
        warnings.simplefilter("ignore")
        for line in table(titles):
            print(line, flush=True)
    return 0


def _size(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of ranks, at least 1")
    return number
