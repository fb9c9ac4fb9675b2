"""A folder of checkpoints that is whole at every moment, whatever happens while one is written.

    folder/global_step100/              a complete checkpoint
    folder/global_step200/
    folder/.global_step300.saving/      one that is being written, or that nobody finished
    folder/.global_step200.replaced/    the one before of that name, for the moment of an exchange
    folder/latest                       the name of the newest complete one

A checkpoint is written under another name, brought to the disk, renamed, and only then pointed at.
Where folders cannot be renamed, as in an object store, its state.json, which comes last and at
once, does the same:

    folder/global_step300/state.json    makes a checkpoint of the files that it names, in
    folder/global_step300/saved-3/      this folder; one that no state.json names is unfinished

One run at a time saves in a folder; any number may read.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipemega.checkpoint.disk import Disk, LocalDisk
from pipemega.checkpoint.manifest import STATE_FILE, Damage, FileEntry, difference, opened, sealed
from pipemega.errors import CheckpointError

POINTER = "latest"

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_STEP_TAG = re.compile(r"global_step(\d+)")
_PART = re.compile(r"saved-\d+")
_OF_A_CHECKPOINT = re.compile(r"tensors|client\.pt|rank_\d+\.pt")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint that has a state.json.

    Args:
        tag: its name.
        path: where its files are, below the root of its disk.
        state: what `finish` kept in state.json.
    """

    tag: str
    path: str
    state: dict[str, Any]

    @property
    def files(self) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = self.state["files"]
        return files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, of those that go by their step.

    Args:
        keep_last: so many of the newest; None: all.
        keep_every: and those of every so manieth step, for good; None: none.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def forgets(self, steps: list[int]) -> list[int]:
        """Which of these, in the order of saving, are to go."""
        if self.keep_last is None:
            return []
        old = steps[: max(0, len(steps) - self.keep_last)]
        return [step for step in old if not self.keep_every or step % self.keep_every]


def step_tag(step: int) -> str:
    """The name of a checkpoint that was given none; these are what `prune` deletes."""
    return f"global_step{step}"


def start(disk: Disk, tag: str) -> str:
    """An empty folder to write `tag` into; what interrupted saves left goes.

    Raises:
        CheckpointError: the tag is no plain name, or that of something else than a checkpoint.
        OSError: the folder cannot be made.
    """
    _check(tag)
    if disk.has(tag) and not _is_complete(disk, tag) and not _parts(disk, tag):
        if not _is_headless(disk, tag):
            raise CheckpointError(
                f"{disk.where(tag)} is there already and is no checkpoint: give another tag, or "
                f"move it away"
            )
        _log.warning("checkpoint %s has lost its %s, and goes", disk.where(tag), STATE_FILE)
        disk.delete(tag)
    if not isinstance(disk, LocalDisk):
        tidy(disk)
        return f"{tag}/saved-{_next_number(disk)}"
    disk.make()
    tidy(disk)
    disk.make(_unfinished(tag))
    return _unfinished(tag)


def finish(
    disk: Disk,
    tag: str,
    part: str,
    state: Mapping[str, Any],
    files: Mapping[str, FileEntry],
    *,
    point: bool = True,
) -> Found:
    """Makes what was written the checkpoint `tag`, and the newest one if `point`.

    Args:
        part: from `start`.
        state: JSON values, kept beside the tensors.
        files: all files in `part`, which are on the disk already.
    """
    whole = {"number": _next_number(disk), "newest": point, **state, "files": dict(files)}
    if isinstance(disk, LocalDisk):
        disk.write(f"{part}/{STATE_FILE}", sealed(whole))
        # Of the files every byte is there; the names in the folders are still to come.
        disk.sync(part)
        _exchange(disk, tag, part, point)
        return Found(tag, tag, whole)
    whole["within"] = part.removeprefix(f"{tag}/")
    disk.write(f"{tag}/{STATE_FILE}", sealed(whole))
    if point:
        disk.write(POINTER, f"{tag}\n".encode())
    _delete_others(disk, tag, whole["within"])
    return Found(tag, part, whole)


def _exchange(disk: LocalDisk, tag: str, part: str, point: bool) -> None:
    replaced, pointer = f".{tag}.replaced", f".{POINTER}.saving"
    if point:
        # Before the renames, so that a full disk is met before anything has changed.
        disk.write(pointer, f"{tag}\n".encode())
    if disk.has(tag):
        disk.rename(tag, replaced)
    disk.rename(part, tag)
    if point:
        disk.rename(pointer, POINTER)
    with suppress(OSError):
        disk.delete(replaced)


def tidy(disk: Disk) -> None:
    """Deletes what interrupted saves left; what was about to be replaced comes back."""
    for name in disk.names():
        if not isinstance(disk, LocalDisk):
            with suppress(CheckpointError):
                _delete_others(disk, name, _within(disk, name))
        elif name.startswith(".") and name.endswith(".replaced"):
            tag = name[1:].removesuffix(".replaced")
            if disk.has(tag) or not _is_complete(disk, name):
                with suppress(OSError):
                    disk.delete(name)
            else:
                disk.rename(name, tag)
        elif name.startswith(".") and name.endswith(".saving"):
            with suppress(OSError):
                disk.delete(name)


def prune(disk: Disk, retention: Retention) -> None:
    """Deletes the checkpoints that `retention` forgets.

    Never the one that is pointed at, and never one that somebody gave a name. What cannot be
    deleted is left, with a warning: it is no reason to end a run.
    """
    try:
        steps = [int(m[1]) for tag in complete(disk) if (m := _STEP_TAG.fullmatch(tag))]
        pointed = latest(disk)
    except OSError as error:
        _log.warning("could not look for old checkpoints in %s: %s", disk.where(), error)
        return
    for tag in map(step_tag, retention.forgets(steps)):
        if tag != pointed:
            try:
                _delete(disk, tag)
            except OSError as error:
                _log.warning("could not delete the old checkpoint %s: %s", disk.where(tag), error)


def latest(disk: Disk) -> str | None:
    """The tag that the pointer names, or None where there is no pointer."""
    if disk.size(POINTER) is None:
        return None
    return disk.read(POINTER).decode("utf-8", errors="replace").strip()


def complete(disk: Disk) -> list[str]:
    """The tags of all checkpoints with a state.json, in the order in which they were saved."""
    tags = [name for name in disk.names() if _TAG.fullmatch(name) and _is_complete(disk, name)]
    numbers = {tag: _number(disk, tag) for tag in tags}
    return sorted(tags, key=lambda tag: (numbers[tag], tag))


def candidates(disk: Disk) -> tuple[list[str], str | None]:
    """The tags to try when none is given, best first; and what is wrong with the pointer.

    The one that is pointed at, then the others that once were, the last one saved first.

    Raises:
        CheckpointError: there is no folder, or nothing in it that could be loaded.
    """
    if not disk.has():
        raise CheckpointError(f"no checkpoint folder {disk.where()}: is the path right?")
    pointed, wrong = latest(disk), None
    if pointed is None:
        wrong = f"{disk.where()} has no file '{POINTER}'"
    elif not _TAG.fullmatch(pointed):
        wrong = f"{disk.where(POINTER)} is damaged: {pointed[:40]!r} is no tag"
        pointed = None
    others = [tag for tag in reversed(complete(disk)) if tag != pointed and _was_newest(disk, tag)]
    tags = others if pointed is None else [pointed, *others]
    if not tags:
        raise CheckpointError(f"{wrong}; {there(disk)}")
    return tags, wrong


def newest(disk: Disk) -> str | None:
    """The tag that is loaded by default, going by sizes alone; None where nothing was ever saved.

    Raises:
        CheckpointError: something was saved, and nothing of it is whole.
    """
    if latest(disk) is None and not complete(disk):
        return None
    damages = []
    for tag in candidates(disk)[0]:
        try:
            return examine(disk, tag).tag
        except Damage as damage:
            damages.append(str(damage))
    raise none_whole(disk, damages)


def none_whole(disk: Disk, damages: list[str]) -> CheckpointError:
    """Of all those that were tried."""
    return CheckpointError(f"no checkpoint in {disk.where()} is whole: {'; '.join(damages)}")


def examine(disk: Disk, tag: str) -> Found:
    """The checkpoint of that tag, if its files have the sizes that were written.

    Raises:
        Damage: it is missing, half-written or damaged; says how.
        CheckpointError: the tag is no plain name, or the format that of another version.
    """
    _check(tag)
    path = tag
    if not disk.has(tag) and _is_complete(disk, f".{tag}.replaced"):
        # A save was interrupted in the moment between its two renames.
        path = f".{tag}.replaced"
    where = disk.where(path)
    if not _is_complete(disk, path):
        what = f"is half-written (no {STATE_FILE})" if disk.has(path) else "is missing"
        raise Damage(f"checkpoint {where} {what}")
    found = _found(disk, tag, path)
    for name, entry in found.files.items():
        wrong = difference(disk, f"{found.path}/{name}", entry, read=False)
        if wrong is not None:
            raise Damage(f"checkpoint {where} is damaged: {name} {wrong}")
    return found


def there(disk: Disk, but: str | None = None) -> str:
    """The end of a message: what could be loaded instead."""
    tags = [tag for tag in complete(disk) if tag != but]
    if tags:
        return f"complete ones there: {', '.join(tags)}: name one of them as the tag"
    left = [name for name in disk.names() if name.endswith(".saving") and disk.names(name)]
    return "there is no complete one" + (
        f", only what an interrupted save left: {', '.join(left)}" if left else ""
    )


def _found(disk: Disk, tag: str, path: str) -> Found:
    try:
        state = opened(disk.read(f"{path}/{STATE_FILE}"))
    except Damage as damage:
        raise Damage(f"checkpoint {disk.where(path)} is damaged: {damage}") from damage
    except CheckpointError as error:
        raise CheckpointError(f"{disk.where(path)}: {error}") from error
    except OSError as error:
        raise Damage(
            f"checkpoint {disk.where(path)} is damaged: {STATE_FILE} cannot be read: "
            f"{error.strerror or error}"
        ) from error
    return Found(tag, f"{path}/{state['within']}" if "within" in state else path, state)


def _delete(disk: Disk, tag: str) -> None:
    """First what makes it a checkpoint, so that nothing half-deleted bears the name of one."""
    if isinstance(disk, LocalDisk):
        disk.rename(tag, _unfinished(tag))
        disk.delete(_unfinished(tag))
    else:
        disk.delete(f"{tag}/{STATE_FILE}")
        disk.delete(tag)


def _delete_others(disk: Disk, tag: str, within: str | None) -> None:
    for part in _parts(disk, tag):
        if part != within:
            with suppress(OSError):
                disk.delete(f"{tag}/{part}")


def _parts(disk: Disk, tag: str) -> list[str]:
    return [name for name in disk.names(tag) if _PART.fullmatch(name)]


def _within(disk: Disk, tag: str) -> str | None:
    if not _is_complete(disk, tag):
        return None
    within: str | None = _found(disk, tag, tag).state.get("within")
    return within


def _unfinished(tag: str) -> str:
    return f".{tag}.saving"


def _check(tag: str) -> None:
    if not _TAG.fullmatch(tag) or tag == POINTER:
        raise CheckpointError(
            f"{tag!r} cannot be the tag, which names a folder: use letters, digits, '_', '-' and "
            f"'.', not '.' first, and not '{POINTER}'"
        )


def _is_headless(disk: Disk, tag: str) -> bool:
    """Whether this was one that goes by its step, and has lost the file that makes it one.

    A run that has gone back behind it comes to its step once more, and must not end there.
    """
    names = disk.names(tag)
    return (
        _STEP_TAG.fullmatch(tag) is not None
        and "tensors" in names
        and all(_OF_A_CHECKPOINT.fullmatch(name) for name in names)
    )


def _is_complete(disk: Disk, path: str) -> bool:
    return disk.size(f"{path}/{STATE_FILE}") is not None


def _next_number(disk: Disk) -> int:
    return 1 + max((_number(disk, tag) for tag in complete(disk)), default=0)


def _number(disk: Disk, tag: str) -> int:
    """The how-manieth save it was; counted, because clocks jump. 0 if it cannot be read."""
    try:
        return int(_found(disk, tag, tag).state.get("number", 0))
    except CheckpointError:
        return 0


def _was_newest(disk: Disk, tag: str) -> bool:
    try:
        return bool(_found(disk, tag, tag).state.get("newest"))
    except Damage:
        # Worth a try, so that it is named among those that are damaged.
        return True
    except CheckpointError:
        return False
