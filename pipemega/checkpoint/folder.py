"""A folder of checkpoints that is whole at every moment, whatever happens while one is written.

    folder/global_step100/     a complete checkpoint
    folder/global_step200/
    folder/.global_step300.part/   one that is being written, or that nobody finished
    folder/latest                  the name of the newest complete one

A checkpoint is written under another name, brought to the disk, renamed, and only then pointed at.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipemega.errors import CheckpointError

STATE_FILE = "state.json"
POINTER = "latest"


def part_of(folder: Path, tag: str) -> Path:
    """Where the checkpoint `tag` is written before it is complete.

    Raises:
        CheckpointError: the tag is not a plain name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", tag):
        raise CheckpointError(
            f"the tag {tag!r} names the checkpoint's folder: use letters, digits, '_', '-' and '.'"
        )
    return folder / f".{tag}.part"


def start(folder: Path, tag: str) -> Path:
    """An empty folder to write `tag` into; what an interrupted save left there goes."""
    part = part_of(folder, tag)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def finish(folder: Path, tag: str, state: Mapping[str, Any], *, point: bool = True) -> Path:
    """Makes what was written the checkpoint `tag`, and the newest one if `point`.

    Args:
        state: kept beside the tensors as JSON, with the sizes of all files.
    """
    part, final = part_of(folder, tag), folder / tag
    files = {p.relative_to(part).as_posix(): p.stat().st_size for p in sorted(part.rglob("*"))}
    write_json(part / STATE_FILE, {**state, "files": files})
    for path in [*part.rglob("*"), part]:
        sync(path)
    if final.exists():
        # Renamed away first, so that at no moment a half-deleted folder bears the name.
        old = folder / f".{tag}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        part.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        part.rename(final)
    sync(folder)
    if point:
        temporary = folder / f".{POINTER}.part"
        temporary.write_text(tag + "\n", encoding="utf-8")
        sync(temporary)
        temporary.rename(folder / POINTER)
        sync(folder)
    return final


def prune(folder: Path, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` complete checkpoints, never the one pointed at."""
    tags = sorted(
        (p for p in folder.iterdir() if (p / STATE_FILE).is_file() and not p.name.startswith(".")),
        key=lambda p: (p / STATE_FILE).stat().st_mtime_ns,
    )
    pointed = latest(folder)
    for path in tags[: max(0, len(tags) - keep_last)]:
        if path.name != pointed:
            shutil.rmtree(path)


def latest(folder: Path) -> str | None:
    """The tag that the pointer names, or None where there is no pointer."""
    pointer = folder / POINTER
    return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


def find(folder: Path, tag: str | None) -> Path:
    """The complete checkpoint `tag`, or the newest one.

    Raises:
        CheckpointError: there is none, or a file of it is missing or of another size; says which.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}: is the path right?")
    tag = tag or latest(folder)
    if tag is None:
        parts = sorted(p.name for p in folder.glob(".*.part"))
        left = f"; a save that was interrupted left {', '.join(parts)}" if parts else ""
        raise CheckpointError(f"{folder} holds no complete checkpoint (no '{POINTER}' file){left}")
    path = folder / tag
    if not (path / STATE_FILE).is_file():
        there = sorted(p.parent.name for p in folder.glob(f"*/{STATE_FILE}"))
        raise CheckpointError(
            f"checkpoint {path} is missing or half-written (no {STATE_FILE}); complete ones there: "
            f"{', '.join(there) or 'none'}: name one of them as the tag"
        )
    for name, size in read_state(path)["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has "
                f"{'gone' if found is None else f'{found} bytes'}, {size} were written; "
                f"load another tag of {folder}"
            )
    return path


def read_state(path: Path) -> dict[str, Any]:
    """What `finish` kept beside the tensors.

    Raises:
        CheckpointError: it is not JSON any more.
    """
    try:
        return dict(json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(f"{path / STATE_FILE} is damaged: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
