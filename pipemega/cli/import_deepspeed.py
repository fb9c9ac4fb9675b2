"""`pipemega checkpoint import-deepspeed`: weights of a DeepSpeed checkpoint."""

import argparse
import json
from pathlib import Path
from typing import get_args

from pipemega.checkpoint.deepspeed import ImportOptions, NameRules, ReadOptions, import_deepspeed
from pipemega.checkpoint.deepspeed.shard_rules import RULES, Rule
from pipemega.checkpoint.deepspeed.weights_loading import describe_left_out
from pipemega.cli.run_options import Subparsers, add_command
from pipemega.config import load
from pipemega.errors import CheckpointError

_TEXT = """Write the weights of a DeepSpeed checkpoint as a checkpoint of pipemega.

FOLDER is what `save_checkpoint` of DeepSpeed wrote: a pipeline (layer_XX-model_states.pt), another
model (mp_rank_XX_model_states.pt), with ZeRO stage 0 to 2; or a universal checkpoint (zero/). With
fp16 and bf16 the fp32 master weights are imported if ZeRO stored them. A run loads OUT with
checkpoint.load_module_only true. The files are read with torch's weights_only: objects of other
classes are left out.

A parameter "norm.weight" of layer 3 becomes layers.3.norm.weight; one of a model without a pipeline
becomes layers.0.<name>."""

_EXAMPLES = f"""examples:
  python -m pipemega checkpoint import-deepspeed ds_run imported
  python -m pipemega checkpoint import-deepspeed ds_run imported --tag global_step500 \\
      --vocab-size 50257 --name 'tied_modules\\.embed\\.(.+)=layers.0.\\1'

rules of --shards:
{chr(10).join(f"  {rule:<12}{meaning}" for rule, meaning in RULES.items())}"""


def add_import(commands: Subparsers) -> None:
    """Add the command."""
    summary = "write the weights of a DeepSpeed checkpoint as a checkpoint of pipemega"
    parser = add_command(commands, "import-deepspeed", _TEXT, _EXAMPLES, summary)
    parser.add_argument(
        "folder", metavar="FOLDER", help="a folder of checkpoints, or one checkpoint, of DeepSpeed"
    )
    parser.add_argument("out", metavar="OUT", help="a folder of checkpoints of pipemega, or a URL")
    parser.add_argument("--tag", help="the checkpoint in FOLDER (default: the one in 'latest')")
    parser.add_argument(
        "--config", metavar="CONFIG", help="config of the run that will load OUT, to store in OUT"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="PATTERN=NAME",
        help="logical name of the parameters whose name of DeepSpeed matches the regular "
        "expression PATTERN; an empty NAME leaves them out; repeatable",
    )
    parser.add_argument(
        "--names", metavar="FILE", help='JSON file of such rules: {"PATTERN": "NAME" or null}'
    )
    parser.add_argument(
        "--shards",
        action="append",
        default=[],
        metavar="PATTERN=RULE",
        help="how the tensor-parallel shards of these parameters form the whole; repeatable",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the embedding and the output head without padding (default: all rows)",
    )
    parser.add_argument(
        "--no-masters",
        dest="masters",
        action="store_false",
        help="import the fp16 or bf16 weights of the model, not the fp32 master weights",
    )
    parser.set_defaults(func=_import)


def _import(arguments: argparse.Namespace) -> int:
    rules = _rules_of_file(arguments.names) if arguments.names else {}
    rules |= {pattern: name or None for pattern, name in _pairs("--name", arguments.name)}
    shards: dict[str, Rule] = {}
    for pattern, rule in _pairs("--shards", arguments.shards):
        if rule not in get_args(Rule):
            raise CheckpointError(f"--shards {pattern}={rule}: the rules are {', '.join(RULES)}")
        shards[pattern] = rule  # type: ignore[assignment]  # one of them, as checked
    options = ImportOptions(
        tag=arguments.tag,
        read=ReadOptions(arguments.masters, shards, arguments.vocab_size),
        names=NameRules(rules),
        config=load(arguments.config).to_dict() if arguments.config else None,
    )
    done = import_deepspeed(arguments.folder, arguments.out, options)
    weights, kinds = done.weights, {t.dtype for t in done.weights.tensors.values()}
    dtypes = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    print(f"{done.path}: {len(done.names)} tensors, {weights.nbytes / 1e6:,.1f} MB, {dtypes}")
    print(f"  from {weights.path} ({weights.kind}, step {weights.global_steps})")
    for name, logical in done.names.items():
        print(f"  {name} -> {logical}")
    left = [name for name in weights.tensors if name not in done.names]
    for name in left:
        print(f"  {name}: left out")
    if (text := describe_left_out(weights)) is not None:
        print(f"  {text}")
    print("load it with checkpoint.load_module_only true; the optimizer state is not imported")
    return 0


def _pairs(option: str, values: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for value in values:
        pattern, sign, other = value.rpartition("=")
        if not sign or not pattern:
            raise CheckpointError(f"{option} {value}: expected PATTERN=..., with a '='")
        pairs.append((pattern, other))
    return pairs


def _rules_of_file(path: str) -> dict[str, str | None]:
    try:
        rules = json.loads(Path(path).read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    values = rules.values() if isinstance(rules, dict) else [0]
    if not all(value is None or isinstance(value, str) for value in values):
        raise CheckpointError(f'{path} must be a JSON object {{"PATTERN": "NAME" or null}}')
    return dict(rules)
