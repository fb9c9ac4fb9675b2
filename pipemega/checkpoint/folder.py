"""A folder of checkpoints that is whole at every moment, whatever happens while one is written.

    folder/global_step100/              a complete checkpoint
    folder/global_step200/
    folder/.global_step300.saving/      one that is being written, or that nobody finished
    folder/.global_step200.replaced/    the one before of that name, for the moment of an exchange
    folder/latest                       the name of the newest complete one

A checkpoint is written under another name, brought to the disk, renamed, and only then pointed at.
One run at a time saves in a folder; any number may read.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipemega.errors import CheckpointError

STATE_FILE = "state.json"
POINTER = "latest"
FORMAT = 1

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_STEP_TAG = re.compile(r"global_step\d+")

_log = logging.getLogger(__name__)


def step_tag(step: int) -> str:
    """The name of a checkpoint that was given none; these are what `prune` deletes."""
    return f"global_step{step}"


def start(folder: Path, tag: str) -> Path:
    """An empty folder to write `tag` into; what interrupted saves left in `folder` goes.

    Raises:
        CheckpointError: the tag is no plain name, or that of something else than a checkpoint.
        OSError: the folder cannot be made.
    """
    unfinished, final = _unfinished(folder, tag), folder / tag
    if final.exists() and not _is_complete(final):
        raise CheckpointError(
            f"{final} is there already and is no checkpoint: give another tag, or move it away"
        )
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
    tidy(folder)
    unfinished.mkdir()
    return unfinished


def finish(folder: Path, tag: str, state: Mapping[str, Any], *, point: bool = True) -> Path:
    """Makes what was written the checkpoint `tag`, and the newest one if `point`.

    Args:
        state: JSON values, kept beside the tensors together with the sizes of all files.
    """
    unfinished, final, replaced = _unfinished(folder, tag), folder / tag, _replaced(folder, tag)
    files = {
        path.relative_to(unfinished).as_posix(): path.stat().st_size
        for path in sorted(unfinished.rglob("*"))
        if path.is_file()
    }
    number = 1 + max((_number(path) for path in complete(folder)), default=0)
    whole = {"format": FORMAT, "number": number, **state, "files": files}
    write(unfinished / STATE_FILE, (json.dumps(whole, indent=1) + "\n").encode())
    # Those who wrote the files have synced them; but torch syncs its index before the last of it
    # has left the process, and the names in the folders are still to come.
    for path in [*unfinished.rglob("*"), unfinished]:
        sync(path)
    pointer = folder / f".{POINTER}.saving"
    if point:
        # Before the renames, so that a full disk is met before anything has changed.
        write(pointer, f"{tag}\n".encode())
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    sync(folder)
    if point:
        pointer.rename(folder / POINTER)
        sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def tidy(folder: Path) -> None:
    """Deletes what interrupted saves left; what was about to be replaced comes back."""
    for replaced in folder.glob(".*.replaced"):
        final = folder / replaced.name[1:].removesuffix(".replaced")
        if final.exists() or not _is_complete(replaced):
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)
    for unfinished in folder.glob(".*.saving"):
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink()


def prune(folder: Path, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints of those that go by their step.

    Never the one that is pointed at, and never one that somebody gave a name. What cannot be
    deleted is left, with a warning: it is no reason to end a run.
    """
    paths = [path for path in complete(folder) if _STEP_TAG.fullmatch(path.name)]
    pointed = latest(folder)
    for path in paths[: max(0, len(paths) - keep_last)]:
        if path.name != pointed:
            # Renamed first, so that no half-deleted folder bears the name of a checkpoint.
            unfinished = _unfinished(folder, path.name)
            try:
                path.rename(unfinished)
                shutil.rmtree(unfinished)
            except OSError as error:
                _log.warning("could not delete the old checkpoint %s: %s", path, error)


def latest(folder: Path) -> str | None:
    """The tag that the pointer names, or None where there is no pointer."""
    pointer = folder / POINTER
    if not pointer.is_file():
        return None
    return pointer.read_text(encoding="utf-8", errors="replace").strip()


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, in the order in which they were saved."""
    paths = [
        path.parent for path in folder.glob(f"*/{STATE_FILE}") if _TAG.fullmatch(path.parent.name)
    ]
    return sorted(paths, key=lambda path: (_number(path), path.name))


def find(folder: Path, tag: str | None = None) -> Path:
    """Where the complete checkpoint `tag`, or the newest one, lies.

    Raises:
        CheckpointError: there is none, or a file of it is missing or of another size; says which,
            and what else there is.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}: is the path right?")
    if tag is None:
        tag = _pointed_at(folder)
    path, replaced = folder / tag, _replaced(folder, tag)
    if not path.exists() and _is_complete(replaced):
        # A save was interrupted in the moment between its two renames.
        path = replaced
    if not _is_complete(path):
        what = f"is half-written (no {STATE_FILE})" if path.exists() else "is missing"
        raise CheckpointError(f"checkpoint {path} {what}; {_there(folder)}")
    for name, size in read_state(path)["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            has = f"has {found} bytes" if found is not None else "is missing"
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} {has}, {size} bytes were written; "
                f"{_there(folder, tag)}"
            )
    return path


def read_state(path: Path) -> dict[str, Any]:
    """What `finish` kept beside the tensors.

    Raises:
        CheckpointError: it cannot be read any more, or is in a format of another version.
    """
    file = path / STATE_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise CheckpointError(f"{file} is damaged: it does not say which files there are")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is of format {state.get('format')}, and this version of pipemega reads format "
            f"{FORMAT}: load it with the version that saved it"
        )
    return state


def write(path: Path, data: bytes) -> None:
    """Writes a file and brings it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pointed_at(folder: Path) -> str:
    tag = latest(folder)
    if tag is None:
        raise CheckpointError(f"{folder} has no file '{POINTER}'; {_there(folder)}")
    if not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"{folder / POINTER} is damaged: {tag[:40]!r} is no tag; {_there(folder)}"
        )
    return tag


def _there(folder: Path, but: str | None = None) -> str:
    """The end of a message: what could be loaded instead."""
    tags = [path.name for path in complete(folder) if path.name != but]
    if tags:
        return f"complete ones there: {', '.join(tags)}: name one of them as the tag"
    left = sorted(path.name for path in folder.glob(".*.saving") if path.is_dir())
    return "there is no complete one" + (
        f", only what an interrupted save left: {', '.join(left)}" if left else ""
    )


def _unfinished(folder: Path, tag: str) -> Path:
    return folder / f".{_checked(tag)}.saving"


def _replaced(folder: Path, tag: str) -> Path:
    return folder / f".{_checked(tag)}.replaced"


def _checked(tag: str) -> str:
    if not _TAG.fullmatch(tag) or tag == POINTER:
        raise CheckpointError(
            f"{tag!r} cannot be the tag, which names a folder: use letters, digits, '_', '-' and "
            f"'.', not '.' first, and not '{POINTER}'"
        )
    return tag


def _is_complete(path: Path) -> bool:
    return (path / STATE_FILE).is_file()


def _number(path: Path) -> int:
    """The how-manieth save it was; counted, because clocks jump. 0 if it cannot be read."""
    try:
        return int(read_state(path).get("number", 0))
    except CheckpointError:
        return 0
