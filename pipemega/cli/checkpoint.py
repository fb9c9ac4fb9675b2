"""`python -m pipemega checkpoint`: list, verify, show, export and import checkpoints.

`pipemega checkpoint import-deepspeed`: weights of a DeepSpeed checkpoint.
"""

import argparse
import json
from collections import defaultdict
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import get_args

from pipemega.checkpoint import layout
from pipemega.checkpoint.deepspeed.deepspeed_folder import NameRules
from pipemega.checkpoint.deepspeed.deepspeed_weights import ReadOptions
from pipemega.checkpoint.deepspeed.shard_rules import RULES, Rule
from pipemega.checkpoint.deepspeed.weights_loading import (
    ImportOptions,
    describe_left_out,
    import_deepspeed,
)
from pipemega.checkpoint.save_load import damaged_files, locate, open_path
from pipemega.cli.run_options import Subparsers, add_command, progress
from pipemega.config import load
from pipemega.errors import CheckpointError
from pipemega.hf.weights.export import export_tensors
from pipemega.printing import aligned
from pipemega.storage.filesystem import Storage

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


_DAMAGED = 1


def add_parser(subparsers: Subparsers) -> None:
    """Add the commands `ls`, `verify`, `show`, `export` and `import-deepspeed`."""
    parser = subparsers.add_parser("checkpoint", help="list, show, export and import checkpoints")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, function in (
        ("ls", "list the checkpoints in a folder", _ls),
        ("verify", "compare the checksum of every file; exit code 1 if one differs", _verify),
        ("show", "show mesh, step and sizes of a checkpoint", _show),
        ("export", "write parameters and buffers of any model to one safetensors file", _export),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "path", help="a folder of checkpoints, or one checkpoint; or a URL that fsspec opens"
        )
        if name != "ls":
            default = "all" if name == "verify" else "the newest"
            command.add_argument("--tag", help=f"the checkpoint in the folder; default: {default}")
        command.set_defaults(func=function)
    for option in ("--config", "--tensors"):
        commands.choices["show"].add_argument(option, action="store_true", help="print them too")
    commands.choices["export"].add_argument("out", type=Path, metavar="OUT.safetensors")
    add_import(commands)


def _ls(arguments: argparse.Namespace) -> int:
    storage, tag = locate(arguments.path)
    tags = _tags(storage, tag)
    latest = layout.read_latest(storage)
    rows = [_row(storage, one, one == latest) for one in tags]
    head = ("tag", "step", "size", "age", "mesh", "state")
    print(aligned([head, *rows], left=len(head)))
    return 0


def _row(storage: Storage, tag: str, is_latest: bool) -> tuple[str, ...]:
    mark = f"{tag} *" if is_latest else tag
    try:
        found = layout.find_checkpoint(storage, tag)
    except CheckpointError as error:
        return (mark, "", "", "", "", _without_path(error, storage, tag))
    state = found.state
    return (
        mark,
        str(state.get("global_steps", "")),
        f"{found.size / 1e6:,.1f} MB",
        _age(state.get("saved_at")),
        str(state.get("mesh", "")),
        "complete (sizes checked)",
    )


def _verify(arguments: argparse.Namespace) -> int:
    storage, tag = locate(arguments.path, arguments.tag)
    code = 0
    for one in _tags(storage, tag):
        path = storage.full_path(one)
        try:
            found = layout.find_checkpoint(storage, one)
            with progress(found.size, "B", found.tag) as on_bytes:
                damages = damaged_files(storage, found, found.files, on_bytes)
        # Also if another version wrote it: continue with the other checkpoints.
        except CheckpointError as error:
            damages = [_without_path(error, storage, one)]
        for damage in damages:
            code = _DAMAGED
            print(f"{path}: DAMAGED: {damage}")
        if not damages:
            print(f"{path}: undamaged, {len(found.files)} files, {found.size / 1e6:,.1f} MB")
    return code


def _show(arguments: argparse.Namespace) -> int:
    reader = open_path(arguments.path, arguments.tag)
    found, tensors = reader.found, reader.tensors.tensors
    state = found.state
    print(reader.full_path)
    print(f"  saved     {state.get('saved_at', '?')} ({_age(state.get('saved_at'))} ago)")
    print(f"  mesh      {state.get('mesh')}")
    print(f"  step      {state.get('global_steps')}")
    print(f"  samples   {state.get('consumed_samples')}")
    print(f"  size      {found.size / 1e6:,.1f} MB in {len(found.files)} files")
    groups = defaultdict(list)
    for name, (shape, _) in tensors.items():
        groups[name.partition("/")[0]].append(prod(shape))
    for group, sizes in groups.items():
        print(f"  {group:<9} {len(sizes)} tensors, {sum(sizes):,} values")
    print("  --tensors lists the tensors, --config prints the config")
    for name, (shape, dtype) in sorted(tensors.items()) if arguments.tensors else ():
        print(f"    {name}  {list(shape)}  {str(dtype).removeprefix('torch.')}")
    if arguments.config:
        print(json.dumps(state.get("config"), indent=2))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    tensors = export_tensors(open_path(arguments.path, arguments.tag), arguments.out)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    print(f"{arguments.out}: {len(tensors)} tensors, {size:,.1f} MB")
    return 0


def _tags(storage: Storage, tag: str | None) -> list[str]:
    """Return `tag`, or all tags; also the one that `latest` names if its checkpoint is missing."""
    if tag is not None:
        return [tag]
    tags, latest = layout.complete_tags(storage), layout.read_latest(storage)
    if latest is not None and latest not in tags:
        tags.append(latest)
    if not tags:
        raise CheckpointError(f"{storage.full_path()}: {layout.describe_complete(storage)}")
    return tags


def _without_path(error: CheckpointError, storage: Storage, tag: str) -> str:
    """Return the message without the path, which the line already shows."""
    return str(error).removeprefix(f"checkpoint {storage.full_path(tag)} ")


def _age(saved_at: str | None) -> str:
    """Return the age in the largest unit that fits, such as '3 h'."""
    if saved_at is None:
        return "?"
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(saved_at)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
