"""`python -m pipemega checkpoint`: list, verify, show, export and import checkpoints."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from math import prod
from pathlib import Path

from tqdm import tqdm

from pipemega.checkpoint import layout
from pipemega.checkpoint.layout import StoredCheckpoint
from pipemega.checkpoint.manifest import Progress
from pipemega.checkpoint.save_load import damaged_files, locate, open_path
from pipemega.cli.import_deepspeed import add_import
from pipemega.cli.run_options import Subparsers
from pipemega.errors import CheckpointError
from pipemega.hf.weights.export import export_tensors
from pipemega.printing import aligned
from pipemega.storage.filesystem import Storage

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
            with _progress(found) as progress:
                damages = damaged_files(storage, found, found.files, progress)
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


@contextmanager
def _progress(found: StoredCheckpoint) -> Iterator[Progress]:
    with tqdm(
        total=found.size,
        unit="B",
        unit_scale=True,
        desc=found.tag,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update
