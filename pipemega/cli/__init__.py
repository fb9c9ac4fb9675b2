"""Command line: one module per command, imported only when the command is used."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from pipemega.errors import PipemegaError
from pipemega.lazy_imports import __version__, import_first
from pipemega.printing import print_error

# A command's module is imported when the command is called: importing torch would slow --help.
COMMANDS: Mapping[str, str] = {
    "check": "validate a config and print it with all defaults",
    "config": "print the JSON Schema and reference pages; convert from DeepSpeed and Megatron-LM",
    "plan": "predict memory, bubble and step time of a config before it runs",
    "schedule": "draw, time or export a pipeline schedule without running it",
    "timeline": "draw a measured training step and compare it with the simulation",
    "data": "prepare text for training and inspect token files",
    "evaluate": "compute the loss and perplexity of a trained model on data sets",
    "generate": "generate text with a trained model",
    "checkpoint": "list, inspect, verify and import checkpoints",
    "hf": "check Hugging Face models, export checkpoints to their format",
    "doctor": "check a cluster before the first run; start it with torchrun or srun",
}

_DESCRIPTION = """\
Train large transformers with data, tensor and pipeline parallelism from one JSON config.

A training is a script, such as pretrain_gpt.py, which torchrun starts: see the last example. The
commands below run in one process and need no GPU; `evaluate` and `generate` can be started with
torchrun too, and `doctor` is started like a training.
`python -m pipemega COMMAND --help` prints the options of a command.
"""

_EXAMPLES = """\
examples:
  python -m pipemega check configs/quickstart.json --world 8 --set pipeline.schedule=gpipe
  python -m pipemega plan configs/gpt_1.3b_tp2_pp4.json --device-memory H100-80GB
  python -m pipemega config schema > pipemega.schema.json
  python -m pipemega schedule 1f1b --pp 4 --microbatches 8
  python -m pipemega data prepare --input python-stdlib --output-prefix data/python
  python -m pipemega evaluate runs/mine --data wiki.txt
  python -m pipemega generate runs/mine --prompt "Once upon a time"
  python -m pipemega checkpoint verify runs/mine
  python -m pipemega checkpoint import-deepspeed ds_run imported
  python -m pipemega hf check models/llama-7b --tensor 2
  python -m pipemega hf export runs/mine exported
  torchrun --nproc_per_node=4 -m pipemega doctor --config configs/quickstart.json
  torchrun --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 2 and one line on stderr for a user error.

    An invalid config gets one line for each of its errors.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        "pipemega",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipemega {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = arguments[0] if arguments else ""
    # pydantic would search all installed packages for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        if command in COMMANDS:
            import_first(f"pipemega.cli.{command}").add_parser(subparsers)
        else:
            for name, text in COMMANDS.items():
                subparsers.add_parser(name, help=text)
        parsed = parser.parse_args(arguments)
        code = int(parsed.func(parsed))
        sys.stdout.flush()
        return code
    except PipemegaError as error:
        lines = str(error).split("\n") if getattr(error, "problems", ()) else [str(error)]
        first, *others = (" ".join(line.split()) for line in lines)
        print_error("\n  ".join([first, *others]))
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print_error(f"pipemega {command} needs torch: pip install torch")
        return 2
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); redirect stdout so that the flush at exit succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        path = f" ({error.filename})" if error.filename is not None else ""
        reason = error.strerror or str(error)
        print_error(f"{reason}{path}")
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
