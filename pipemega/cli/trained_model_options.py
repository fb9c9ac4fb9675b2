"""What `evaluate` and `generate` have in common: options, the start of ranks, the model."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from pipemega.cli.run_options import add_overrides
from pipemega.distributed.mesh import launched_world_size
from pipemega.fault_tolerance.run import run, skip_teardown


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
    has_ranks = launched_world_size() > 1
    disabled = logging.root.manager.disable
    if not arguments.verbose:
        logging.disable(max(disabled, logging.INFO))
    try:
        with run() if has_ranks else nullcontext():
            yield
        if has_ranks:
            skip_teardown(0)
    finally:
        logging.disable(disabled)


def positive_count(text: str) -> int:
    """Return an option's number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)
