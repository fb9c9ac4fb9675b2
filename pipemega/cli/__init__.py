"""The command line: one file per command, and nothing imported that the command does not need."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from pipemega.errors import PipemegaError

# A command's file is imported when it is called: some need torch, and --help must be quick.
COMMANDS: Mapping[str, str] = {
    "check": "validate a config and show what it resolves to",
    "config": "the JSON Schema and the reference page of the config",
    "plan": "what a config will do: memory, bubble, time, and whether it fits",
    "schedule": "draw, time or export a pipeline schedule, on paper",
    "timeline": "look at a step that a run has measured",
    "data": "prepare text for training, look at token files",
    "checkpoint": "look at checkpoints, and check them",
}

_DESCRIPTION = """\
Train large transformers over data, tensor and pipeline ranks, from one JSON file.

Training itself is started by torchrun; the commands below need no GPU and start no ranks.
`python -m pipemega COMMAND --help` says what a command takes.
"""

_EXAMPLES = """\
examples:
  python -m pipemega check configs/quickstart.json --world 8 --set pipeline.schedule=gpipe
  python -m pipemega plan configs/gpt_1.3b_tp2_pp4.json --device-memory H100-80GB
  python -m pipemega config schema > pipemega.schema.json
  python -m pipemega schedule 1f1b --pp 4 --microbatches 8
  python -m pipemega data prepare --input python-stdlib --output-prefix data/python
  python -m pipemega checkpoint verify runs/mine
  torchrun --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 2, and one line, for a mistake of the user."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        "pipemega",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = arguments[0] if arguments else ""
    if command in COMMANDS:
        import_module(f"pipemega.cli.{command}").add_parser(subparsers)
    else:
        for name, text in COMMANDS.items():
            subparsers.add_parser(name, help=text)
    try:
        parsed = parser.parse_args(arguments)
        code = int(parsed.func(parsed))
        sys.stdout.flush()
        return code
    except PipemegaError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`| head`); Python's own flush at exit must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
