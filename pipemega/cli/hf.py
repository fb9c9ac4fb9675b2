"""`pipemega hf`: Hugging Face models.

`pipemega hf check`.
"""

import argparse
import json
import logging
import re
import warnings
from contextlib import ExitStack

import torch

from pipemega.checkpoint.save_load import open_path
from pipemega.cli.run_options import Subparsers, add_command, positive_count, progress
from pipemega.hf.hf_module import read_config
from pipemega.hf.placeholders import without_progress_bars
from pipemega.hf.weights.checkpoint_model import export_adapter, export_checkpoint
from pipemega.hf_check.check_report import report, table, titles_of, values
from pipemega.hf_check.model_check import check_model
from pipemega.hf_check.split_run import SplitSettings, prepare_ranks
from pipemega.printing import print_report

_CHECK = """\
Check that pipemega trains a Hugging Face model as transformers does, on the installed versions.

The config is shrunk: fewer layers, heads, experts and tokens, narrower. With random weights in
float64, transformers' own model computes loss and gradients in this process, and the split model
on P x T x E processes of this machine (gloo, no GPU). Every gradient is compared. The command also
checks that every layer of the full size can be split over T tensor and E expert ranks. It reads no
weights.

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
  python -m pipemega hf check models/mixtral-8x7b --expert 2
"""


def add_check(commands: Subparsers) -> None:
    """Add the command `check`."""
    parser = add_command(
        commands, "check", _CHECK, _EXAMPLE, "compare the split model with transformers' own"
    )
    parser.add_argument("path", help="folder with config.json, or this file")
    parser.add_argument(
        "--pipeline",
        type=positive_count,
        default=2,
        metavar="P",
        help="pipeline ranks (default: 2)",
    )
    parser.add_argument(
        "--tensor", type=positive_count, default=1, metavar="T", help="tensor ranks (default: 1)"
    )
    parser.add_argument(
        "--expert",
        type=positive_count,
        default=1,
        metavar="E",
        help="data ranks that divide the experts, as mesh.expert (default: 1)",
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
        expert=arguments.expert,
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


_DTYPES = ("float32", "bfloat16", "float16", "float64")

_HF = """Check that a Hugging Face model trains as in transformers; export to its format.

To train such a model, set "model": {"type": "hf", "path": FOLDER} in the config. `evaluate` and
`generate` take the folder of such a model, and the checkpoints of its training.
"""

_HF_EXAMPLES = """examples:
  python -m pipemega hf check models/llama-7b --tensor 2 --pipeline 2
  python -m pipemega hf export runs/mine exported
  python -m pipemega hf export --help
"""

_EXPORT = """Write the model of a checkpoint as a folder that transformers loads.

The checkpoint may be of any mesh. Its model is a Hugging Face model, the GPT of model.type "gpt"
(written as GPT2, Llama or Qwen2), or the ViT of model.type "vit". One process streams the tensors,
so the model need not fit into memory. FOLDER gets model*.safetensors, config.json,
generation_config.json and the tokenizer. LoRA adapters are merged into the weights; with --adapter,
FOLDER gets the adapter alone, in peft's format."""

_EXPORT_EXAMPLES = """examples:
  python -m pipemega hf export runs/mine exported
  python -m pipemega hf export runs/mine exported --tag global_step500 --dtype bfloat16 \\
      --source models/llama
  python -m pipemega hf export runs/mine adapter --adapter"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the commands of `pipemega hf`."""
    parser = add_command(subparsers, "hf", _HF, _HF_EXAMPLES)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_check(commands)
    add_table(commands)
    _add_export(commands)


def _add_export(commands: Subparsers) -> None:
    summary = "write a checkpoint as a folder for transformers"
    parser = add_command(commands, "export", _EXPORT, _EXPORT_EXAMPLES, summary)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder of checkpoints, or one checkpoint; or a URL that fsspec opens",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")
    parser.add_argument("--tag", help="the checkpoint in the folder (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of the weights (default: bfloat16 or float16 if the run used it, else the "
        "dtype of the checkpoint)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="size of the largest file, such as 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--source",
        metavar="FOLDER",
        help="folder with the tokenizer and the generation config (default: the folder from which "
        "the model was loaded)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter: adapter_model.safetensors and adapter_config.json",
    )
    parser.set_defaults(func=_export)


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text


def _export(arguments: argparse.Namespace) -> int:
    if arguments.adapter:
        size = export_adapter(open_path(arguments.checkpoint, arguments.tag), arguments.folder)
        print(f"{arguments.folder}: adapter for peft, {size / 1e6:,.1f} MB")
        return 0
    with ExitStack() as bars:
        written = export_checkpoint(
            arguments.checkpoint,
            arguments.folder,
            tag=arguments.tag,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            max_shard_size=arguments.max_shard_size,
            source=arguments.source,
            # Called with the size, once it is known.
            start=lambda size: bars.enter_context(progress(size, "B")),
        )
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    print(
        f"{arguments.folder}: {written.class_name}, {written.size / 1e6:,.1f} MB "
        f"{str(written.dtype).removeprefix('torch.')} in {files}"
    )
    if written.tokenizer:
        print(f"tokenizer: {', '.join(written.tokenizer)}")
    else:
        print(
            "no tokenizer was copied: give its folder by --source, or copy a tokenizer file to "
            f"{arguments.folder}/tokenizer.json"
        )
    return 0
