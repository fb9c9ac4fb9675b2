"""`python -m pipemega checkpoint`: what lies in a folder, and whether it is whole."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from pipemega.checkpoint import folder as folders
from pipemega.checkpoint.disk import Disk, disk_at
from pipemega.checkpoint.folder import Found
from pipemega.checkpoint.manifest import STATE_FILE, Damage, Progress
from pipemega.checkpoint.storage import Reader
from pipemega.checkpoint.store import TENSORS, damaged_files
from pipemega.errors import CheckpointError

_DAMAGED = 1


def add_parser(subparsers: Any) -> None:
    """The three commands."""
    parser = subparsers.add_parser("checkpoint", help="look at checkpoints, and check them")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, function in (
        ("ls", "list the checkpoints of a folder", _ls),
        ("verify", "compare every file with what was written; exit code 1 if one differs", _verify),
        ("show", "what a checkpoint holds: mesh, step, config, tensors", _show),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "path", help="a folder of checkpoints, or one in it; or a URL that fsspec knows"
        )
        if name != "ls":
            which = "all" if name == "verify" else "the newest"
            command.add_argument("--tag", help=f"which of the folder's; {which} by default")
        command.set_defaults(func=function)


def _ls(arguments: argparse.Namespace) -> int:
    disk, tag = _place(arguments.path)
    tags = _tags(disk, tag)
    pointed = folders.latest(disk)
    rows = [_row(disk, one, one == pointed) for one in tags]
    head = ("tag", "step", "size", "age", "mesh", "state")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return 0


def _row(disk: Disk, tag: str, pointed: bool) -> tuple[str, ...]:
    mark = f"{tag} *" if pointed else tag
    try:
        found = folders.examine(disk, tag)
    except CheckpointError as error:
        what = str(error).removeprefix(f"checkpoint {disk.where(tag)} ")
        return (mark, "", "", "", "", what)
    state = found.state
    return (
        mark,
        str(state.get("global_steps", "")),
        f"{found.size / 1e6:,.1f} MB",
        _age(state.get("saved_at")),
        str(state.get("mesh", "")),
        "whole (by sizes)",
    )


def _verify(arguments: argparse.Namespace) -> int:
    disk, tag = _place(arguments.path, arguments.tag)
    code = 0
    for one in _tags(disk, tag):
        try:
            found = folders.examine(disk, one)
            with _progress(found) as progress:
                wrongs = damaged_files(disk, found, found.files, progress)
        except Damage as damage:
            wrongs = [str(damage).removeprefix(f"checkpoint {disk.where(one)} ")]
            found = None
        except CheckpointError as error:
            # Of another version: the others are looked at all the same.
            wrongs, found = [str(error)], None
        if wrongs:
            code = _DAMAGED
            for wrong in wrongs:
                print(f"{disk.where(one)}: DAMAGED: {wrong}")
        elif found is not None:
            print(f"{disk.where(one)}: whole, {len(found.files)} files, {found.size / 1e6:,.1f} MB")
    return code


def _show(arguments: argparse.Namespace) -> int:
    disk, tag = _place(arguments.path, arguments.tag)
    tag = tag or folders.newest(disk)
    if tag is None:
        raise CheckpointError(f"{disk.where()}: nothing was saved here")
    found = folders.examine(disk, tag)
    state = found.state
    print(f"{disk.where(tag)}")
    print(f"  saved     {state.get('saved_at', '?')} ({_age(state.get('saved_at'))} ago)")
    print(f"  mesh      {state.get('mesh')}")
    print(f"  step      {state.get('global_steps')}")
    print(f"  samples   {state.get('consumed_samples')}")
    print(f"  size      {found.size / 1e6:,.1f} MB in {len(found.files)} files")
    tensors = Reader(disk, f"{found.path}/{TENSORS}").tensors
    print(f"  tensors   {len(tensors)}")
    for name, (shape, dtype) in sorted(tensors.items()):
        print(f"    {name}  {list(shape)}  {str(dtype).removeprefix('torch.')}")
    print("  config")
    for line in json.dumps(state.get("config"), indent=2).splitlines():
        print(f"    {line}")
    return 0


def _place(path: str, tag: str | None = None) -> tuple[Disk, str | None]:
    """The folder of checkpoints, and the tag if one is meant.

    Raises:
        CheckpointError: there is nothing.
    """
    path = path.rstrip("/") or "/"
    above, _, name = path.rpartition("/")
    if tag is None and disk_at(path).size(STATE_FILE) is not None:
        return disk_at(above or "."), name
    disk = disk_at(path)
    if not disk.has():
        raise CheckpointError(f"no checkpoint folder {disk.where()}: is the path right?")
    return disk, tag


def _tags(disk: Disk, tag: str | None) -> list[str]:
    """`tag`, or all there are, and the one that is pointed at even if it is not there."""
    if tag is not None:
        return [tag]
    tags, pointed = folders.complete(disk), folders.latest(disk)
    if pointed is not None and pointed not in tags:
        tags.append(pointed)
    if not tags:
        raise CheckpointError(f"{disk.where()}: {folders.there(disk)}")
    return tags


def _age(saved_at: str | None) -> str:
    """In the largest unit that fits: 3 h."""
    if saved_at is None:
        return "?"
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(saved_at)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@contextmanager
def _progress(found: Found) -> Iterator[Progress]:
    with tqdm(
        total=found.size,
        unit="B",
        unit_scale=True,
        desc=found.tag,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update
