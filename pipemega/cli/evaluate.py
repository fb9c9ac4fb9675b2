"""Evaluate a trained model: loss, perplexity and tokens, or accuracy, of each data set.

  CHECKPOINT   a folder of checkpoints, one checkpoint, or a URL that fsspec opens; or a folder of
               transformers with config.json and safetensors, such as `pipemega hf export` writes
  --data       what to evaluate on, repeatable, as SOURCE or NAME=SOURCE:
                 PREFIX        token files PREFIX.bin and PREFIX.idx
                 PATH          text as in data.corpus, or the records of --format; it is tokenized
                               with the tokenizer of the model
                 FOLDER        for a model of images: as data.valid_path, or CIFAR's files
                 MODULE:NAME   a dataset of (inputs, labels), or a function that returns one
               Default: the validation set of the run; see --split.

The model, its data and its precision come from the config in the checkpoint; --set changes keys of
it. The loss is the mean over all tokens that count (all samples, if labels are not tokens), the
perplexity exp(loss). The last sample of a set may be shorter, so no token is dropped.

One process evaluates the whole model. Under torchrun the mesh is the mesh of the run, with more
or fewer data ranks; set mesh.pipeline and mesh.tensor for another mesh.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from pipemega.cli.run_options import (
    Subparsers,
    add_command,
    add_model_options,
    launched,
    positive_count,
    progress,
)
from pipemega.config import Config
from pipemega.distributed.mesh import Mesh, launched_world_size
from pipemega.engine.run.run_arguments import build_mesh_of
from pipemega.printing import aligned, percent
from pipemega.training.evaluation_sets import FORMATS, EvaluationSet, EvaluationSets
from pipemega.training.trained_model import ModelSource, find_model, open_model
from pipemega.training.validation import SetResult, evaluate_set

_EPILOG = """\
examples:
  python -m pipemega evaluate runs/mine
  python -m pipemega evaluate runs/mine --data data/wiki --data code=src/*.py --json
  torchrun --nproc_per_node=4 -m pipemega evaluate runs/mine --tag global_step200 \\
      --set mesh.pipeline=2 --set mesh.tensor=2
  python -m pipemega evaluate exported/ --data notes.txt --set model.seq_length=512
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `evaluate`."""
    parser = add_command(subparsers, "evaluate", __doc__, _EPILOG)
    add_model_options(parser)
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]SOURCE",
        help="a data set; repeatable; default: the data of the run",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="format of the files in --data: text (corpus), or records as in data.format (default: "
        "the format of the run's data)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "valid", "test"),
        default="valid",
        help="without --data: the part of the run's data (default: valid)",
    )
    parser.add_argument(
        "--samples",
        type=positive_count,
        metavar="N",
        help="samples of each data set, at most (default: all)",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the data sets and print the results on rank 0."""
    with launched(arguments):
        source = find_model(arguments.checkpoint, arguments.tag)
        config = source.config_for(launched_world_size(), arguments.overrides)
        mesh = build_mesh_of(config)
        # Before the model: a missing file is reported at once.
        sets = _sets(arguments, source, config, mesh)
        _, engine = open_model(source, config, mesh)
        results = []
        for data in sets:
            size = len(data.data) if hasattr(data.data, "__len__") else None
            with progress(size, "sample", data.name, mesh.rank == 0) as on_batch:
                results.append(evaluate_set(engine, data, on_batch))
        if mesh.rank == 0:
            _print(source, results, as_json=arguments.json)
    return 0


def _sets(
    arguments: argparse.Namespace, source: ModelSource, config: Config, mesh: Mesh
) -> list[EvaluationSet]:
    on_terminal = mesh.rank == 0 and sys.stderr.isatty()
    sets = EvaluationSets(
        config,
        source.vocab_size(config),
        format_name=arguments.format,
        num_samples=arguments.samples,
        say=(lambda line: print(line, file=sys.stderr)) if on_terminal else None,
        progress=on_terminal,
    )
    return sets.named(arguments.data) if arguments.data else [sets.own(arguments.split)]


def _print(source: ModelSource, results: Sequence[SetResult], *, as_json: bool) -> None:
    if as_json:
        values = {result.name: result.to_dict() for result in results}
        print(json.dumps({"path": source.path, "step": source.step, "data": values}, indent=1))
        return
    step = "" if source.step is None else f", step {source.step}"
    print(f"{source.path}{step}")
    rows = [_row(result) for result in results]
    print(aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)]))


def _row(result: SetResult) -> dict[str, str]:
    """Return column -> text."""
    if result.accuracy is not None:
        quality = {"accuracy": percent(result.accuracy, 1)}
    else:
        perplexity = "" if result.perplexity is None else f"{result.perplexity:.2f}"
        tokens = f"{result.tokens:,}" if result.tokens else ""
        quality = {"perplexity": perplexity, "tokens": tokens}
    return {
        "data": result.name,
        "loss": f"{result.loss:.4f}",
        **quality,
        "samples": f"{result.samples:,}",
        "seconds": f"{result.seconds:.1f}",
    }
