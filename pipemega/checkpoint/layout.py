"""Layout of a folder of checkpoints; an interrupted save never damages an earlier checkpoint.

    folder/global_step100/              a complete checkpoint
    folder/global_step200/
    folder/.global_step300.saving/      a checkpoint that is being written, or an interrupted save
    folder/.global_step200.replaced/    the previous checkpoint of that tag, during its replacement
    folder/.global_step200.incomplete/  files of that step that were no checkpoint
    folder/latest                       the tag of the newest complete checkpoint

A save writes into a temporary folder, syncs it, renames it, and then updates `latest`. An object
store cannot rename folders. There the state.json, which is written last and atomically, completes
the checkpoint:

    folder/global_step300/state.json    names the files of the checkpoint, in
    folder/global_step300/saved-3/      this folder; a folder that no state.json names is incomplete

Only one run at a time may save in a folder (`storage.folder_lock`); any number may read.

Compare the size of checkpoints with the free space of the folder; log a warning, never fail.
"""

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemega.checkpoint import manifest, tensors
from pipemega.checkpoint.manifest import STATE_FILE, DamagedCheckpoint, FileEntry
from pipemega.checkpoint.tensors import OutgoingShard
from pipemega.distributed.mesh import Mesh
from pipemega.errors import CheckpointError
from pipemega.lazy_imports import load_name
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.model.stages import LocalModel
from pipemega.storage.filesystem import LocalStorage, Storage, is_remote
from pipemega.storage.locks import folder_locks

POINTER = "latest"

# For each other system: the function that finds its checkpoint in a folder, and the function that
# loads the weights.
_FOREIGN = (
    (
        "pipemega.checkpoint.deepspeed:find_deepspeed",
        "pipemega.checkpoint.deepspeed:load_deepspeed",
    ),
)

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_STEP_TAG = re.compile(r"global_step(\d+)")
_VERSION_FOLDER = re.compile(r"saved-\d+")
_CHECKPOINT_FILE = re.compile(r"tensors|client\.pt|rank_\d+\.pt")

_log = logging.getLogger(__name__)


def find_foreign(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, str] | None:
    """Return a checkpoint of another system, and the name of what loads it; None: there is none.

    Raises:
        CheckpointError: the folder names a checkpoint that does not exist.
    """
    if is_remote(folder):
        return None
    for find, load in _FOREIGN:
        path = load_name(find)(folder, tag)
        if path is not None:
            return path, load
    return None


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that has a state.json.

    Args:
        tag: name of the checkpoint.
        path: the folder of its files, relative to the root of the storage.
        state: the content of state.json.
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
    """Which of the checkpoints whose tag is global_step<N> are kept.

    Args:
        keep_last: the number of newest checkpoints to keep; None: all.
        keep_every: permanently keep checkpoints whose step is a multiple of this; None: none.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def to_delete(self, steps: list[int]) -> list[int]:
        """Return which of these steps, in the order of saving, to delete."""
        if self.keep_last is None:
            return []
        old = steps[: max(0, len(steps) - self.keep_last)]
        return [step for step in old if not self.keep_every or step % self.keep_every]


def step_tag(step: int) -> str:
    """Return the default tag of a checkpoint; `prune` deletes only checkpoints with such tags."""
    return f"global_step{step}"


def begin_save(storage: Storage, tag: str) -> str:
    """Return an empty folder to write the checkpoint into; delete leftovers of interrupted saves.

    Raises:
        CheckpointError: the tag is invalid, or names something that is not a checkpoint.
        OSError: the folder cannot be created.
    """
    _check_tag(tag)
    folder_locks.verify(storage)
    read_latest(storage)
    if storage.exists(tag) and not _has_state(storage, tag) and not _versions(storage, tag):
        _set_aside(storage, tag)
    if not isinstance(storage, LocalStorage):
        delete_leftovers(storage)
        return f"{tag}/saved-{_next_number(storage)}"
    storage.make_folder()
    delete_leftovers(storage)
    storage.make_folder(_temporary(tag))
    return _temporary(tag)


def commit_save(
    storage: Storage,
    tag: str,
    folder: str,
    state: Mapping[str, Any],
    files: Mapping[str, FileEntry],
    *,
    set_latest: bool = True,
) -> StoredCheckpoint:
    """Write state.json, which completes the checkpoint, and move it to its final name.

    Args:
        folder: the folder that `begin_save` returned.
        state: JSON values to store in state.json.
        files: all files in `folder`; their content is already synced.
        set_latest: make it the checkpoint that is loaded by default.

    Raises:
        FolderLockedError: another run has taken the folder over.
    """
    folder_locks.verify(storage)
    number = _next_number(storage)
    state = {"number": number, "newest": set_latest, **state, "files": dict(files)}
    if isinstance(storage, LocalStorage):
        storage.write(f"{folder}/{STATE_FILE}", manifest.dump_state(state))
        # The files are synced; their names in the folders are not.
        storage.sync_folders(folder)
        _replace(storage, tag, folder, set_latest)
        return StoredCheckpoint(tag, tag, state)
    version = folder.removeprefix(f"{tag}/")
    state["within"] = version
    storage.write(f"{tag}/{STATE_FILE}", manifest.dump_state(state))
    if set_latest:
        storage.write(POINTER, f"{tag}\n".encode())
    _delete_other_versions(storage, tag, version)
    return StoredCheckpoint(tag, folder, state)


def _replace(storage: LocalStorage, tag: str, folder: str, set_latest: bool) -> None:
    replaced, pointer = f".{tag}.replaced", f".{POINTER}.saving"
    if set_latest:
        # Before the renames: if the disk is full, this fails before anything has changed.
        storage.write(pointer, f"{tag}\n".encode())
    if storage.exists(tag):
        storage.rename(tag, replaced)
    storage.rename(folder, tag)
    if set_latest:
        storage.rename(pointer, POINTER)
    with suppress(OSError):
        storage.delete(replaced)


def delete_leftovers(storage: Storage) -> None:
    """Delete the files of interrupted saves; restore a checkpoint that was not yet replaced."""
    for name in storage.listdir():
        if not isinstance(storage, LocalStorage):
            with suppress(CheckpointError):
                _delete_other_versions(storage, name, _current_version(storage, name))
        elif name.startswith(".") and name.endswith(".replaced"):
            tag = name[1:].removesuffix(".replaced")
            if storage.exists(tag) or not _has_state(storage, name):
                with suppress(OSError):
                    storage.delete(name)
            else:
                storage.rename(name, tag)
        elif name.startswith(".") and name.endswith(".saving"):
            with suppress(OSError):
                storage.delete(name)


def prune(storage: Storage, retention: Retention) -> None:
    """Delete the checkpoints that `retention` does not keep.

    The checkpoint that `latest` names and checkpoints whose tag the user chose are never deleted.
    A checkpoint that cannot be deleted is logged and stays: the run must not end because of it.
    """
    try:
        steps = [int(m[1]) for tag in complete_tags(storage) if (m := _STEP_TAG.fullmatch(tag))]
        latest = read_latest(storage)
    except OSError as error:
        _log.warning("could not list old checkpoints in %s: %s", storage.full_path(), error)
        return
    for tag in map(step_tag, retention.to_delete(steps)):
        if tag != latest:
            try:
                _delete(storage, tag)
            except OSError as error:
                path = storage.full_path(tag)
                _log.warning("could not delete the old checkpoint %s: %s", path, error)


def read_latest(storage: Storage) -> str | None:
    """Return the tag in the file `latest`; None if there is no such file.

    Raises:
        CheckpointError: `latest` is a folder, so that no save could complete.
    """
    if storage.size(POINTER) is None:
        if storage.exists(POINTER):
            raise CheckpointError(
                f"{storage.full_path(POINTER)} is a folder, and must be a file with the tag of the "
                "newest checkpoint: move the folder away"
            )
        return None
    return storage.read(POINTER).decode("utf-8", errors="replace").strip()


def complete_tags(storage: Storage) -> list[str]:
    """Return the tags of all checkpoints with a state.json, in the order of saving."""
    tags = [
        name for name in storage.listdir() if _TAG.fullmatch(name) and _has_state(storage, name)
    ]
    numbers = {tag: _number(storage, tag) for tag in tags}
    return sorted(tags, key=lambda tag: (numbers[tag], tag))


def candidates(storage: Storage) -> tuple[list[str], str | None]:
    """Return the tags to try when the user names none, best first; and the defect of `latest`.

    First the tag in `latest`, then the others that were once the latest, newest first.

    Raises:
        CheckpointError: the folder does not exist, or contains no checkpoint.
    """
    if not storage.exists():
        raise CheckpointError(f"no checkpoint folder {storage.full_path()!r}: is the path right?")
    latest, defect = read_latest(storage), None
    if latest is None:
        defect = f"{storage.full_path()} has no file '{POINTER}'"
    elif not _TAG.fullmatch(latest):
        defect = f"{storage.full_path(POINTER)} is damaged: {latest[:40]!r} is not a tag"
        latest = None
    complete = reversed(complete_tags(storage))
    others = [tag for tag in complete if tag != latest and _was_latest(storage, tag)]
    tags = others if latest is None else [latest, *others]
    if not tags:
        raise CheckpointError(f"{defect}; {describe_complete(storage)}")
    return tags, defect


def newest(storage: Storage) -> str | None:
    """Return the tag that is loaded by default, comparing sizes only; None if nothing was saved.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    if read_latest(storage) is None and not complete_tags(storage):
        return None
    damages = []
    for tag in candidates(storage)[0]:
        try:
            return find_checkpoint(storage, tag).tag
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
    raise all_damaged(storage, damages)


def all_damaged(storage: Storage, damages: list[str]) -> CheckpointError:
    """Return the error that lists the damage of every candidate."""
    return CheckpointError(
        f"no checkpoint in {storage.full_path()} is complete and undamaged: {'; '.join(damages)}"
    )


def find_checkpoint(storage: Storage, tag: str) -> StoredCheckpoint:
    """Return the checkpoint `tag` if all its files exist with the sizes that were written.

    Raises:
        DamagedCheckpoint: it is missing, incomplete or damaged; the message says how.
        CheckpointError: the tag is invalid, or another version wrote the checkpoint.
    """
    _check_tag(tag)
    path = tag
    if not storage.exists(tag) and _has_state(storage, f".{tag}.replaced"):
        # A save was interrupted between its two renames.
        path = f".{tag}.replaced"
    where = storage.full_path(path)
    if not _has_state(storage, path):
        what = f"is incomplete (no {STATE_FILE})" if storage.exists(path) else "is missing"
        raise DamagedCheckpoint(f"checkpoint {where} {what}")
    found = _read_state(storage, tag, path)
    for name, entry in found.files.items():
        damage = manifest.file_damage(storage, f"{found.path}/{name}", entry, checksum=False)
        if damage is not None:
            raise DamagedCheckpoint(f"checkpoint {where} is damaged: {name} {damage}")
    return found


def describe_complete(storage: Storage, excluded: str | None = None) -> str:
    """Return the last part of an error message: the checkpoints that can be loaded."""
    tags = [tag for tag in complete_tags(storage) if tag != excluded]
    if tags:
        return f"complete checkpoints there: {', '.join(tags)}: name one of them as the tag"
    left = [n for n in storage.listdir() if n.endswith(".saving") and storage.listdir(n)]
    return "there is no complete checkpoint" + (
        f", only those of interrupted saves: {', '.join(left)}" if left else ""
    )


def _read_state(storage: Storage, tag: str, path: str) -> StoredCheckpoint:
    where = storage.full_path(path)
    try:
        state = manifest.parse_state(storage.read(f"{path}/{STATE_FILE}"))
    except DamagedCheckpoint as damage:
        raise DamagedCheckpoint(f"checkpoint {where} is damaged: {damage}") from damage
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except OSError as error:
        reason = f"{STATE_FILE} cannot be read: {error.strerror or error}"
        raise DamagedCheckpoint(f"checkpoint {where} is damaged: {reason}") from error
    return StoredCheckpoint(tag, f"{path}/{state['within']}" if "within" in state else path, state)


def _delete(storage: Storage, tag: str) -> None:
    """Delete a checkpoint; first make it invalid, so that a half-deleted one is never loaded."""
    if isinstance(storage, LocalStorage):
        storage.rename(tag, _temporary(tag))
        storage.delete(_temporary(tag))
    else:
        storage.delete(f"{tag}/{STATE_FILE}")
        storage.delete(tag)


def _delete_other_versions(storage: Storage, tag: str, current: str | None) -> None:
    for version in _versions(storage, tag):
        if version != current:
            with suppress(OSError):
                storage.delete(f"{tag}/{version}")


def _versions(storage: Storage, tag: str) -> list[str]:
    """Return the folders saved-<n> of a tag in an object store."""
    return [name for name in storage.listdir(tag) if _VERSION_FOLDER.fullmatch(name)]


def _current_version(storage: Storage, tag: str) -> str | None:
    if not _has_state(storage, tag):
        return None
    version: str | None = _read_state(storage, tag, tag).state.get("within")
    return version


def _temporary(tag: str) -> str:
    return f".{tag}.saving"


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag) or tag == POINTER:
        raise CheckpointError(
            f"{tag!r} cannot be the tag, which names a folder: use letters, digits, '_', '-' and "
            f"'.', do not start with '.', and do not use '{POINTER}'"
        )


def _set_aside(storage: Storage, tag: str) -> None:
    """Make room for a checkpoint in place of files of a checkpoint without its state.json.

    A run that resumed from an earlier checkpoint saves this step again, and must not fail here. An
    object store cannot rename: there the files stay beside the new ones.

    Raises:
        CheckpointError: it is not a folder that contains only such files.
    """
    where = storage.full_path(tag)
    found = [tag] if storage.size(tag) is not None else storage.listdir(tag)
    foreign = next((name for name in found if not _CHECKPOINT_FILE.fullmatch(name)), None)
    if foreign is not None:
        raise CheckpointError(
            f"{where} exists and is not a checkpoint: no checkpoint contains {foreign!r}; choose "
            "another tag, or move it away"
        )
    aside = f".{tag}.incomplete"
    if isinstance(storage, LocalStorage):
        if storage.exists(aside):
            storage.delete(aside)
        storage.rename(tag, aside)
    _log.warning(
        "%s has no %s, as after a kill in a save: it is no checkpoint, and %s",
        where,
        STATE_FILE,
        f"is moved to {aside}" if isinstance(storage, LocalStorage) else "is written anew",
    )


def _has_state(storage: Storage, path: str) -> bool:
    return storage.size(f"{path}/{STATE_FILE}") is not None


def _next_number(storage: Storage) -> int:
    return 1 + max((_number(storage, tag) for tag in complete_tags(storage)), default=0)


def _number(storage: Storage, tag: str) -> int:
    """Return the serial number of the save (clocks can jump); 0 if it cannot be read."""
    try:
        return int(_read_state(storage, tag, tag).state.get("number", 0))
    except CheckpointError:
        return 0


def _was_latest(storage: Storage, tag: str) -> bool:
    try:
        return bool(_read_state(storage, tag, tag).state.get("newest"))
    except DamagedCheckpoint:
        # Try it, so that the messages list it as damaged.
        return True
    except CheckpointError:
        return False


def outgoing_bytes(shards: Mapping[str, OutgoingShard]) -> int:
    """Return the bytes that this rank writes into `tensors/`."""
    parts = [part for shard in shards.values() for part in shard.chunks.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def estimated_bytes(
    state_bytes: int, mesh: Mesh, model: LocalModel, step: OptimizerStep | None
) -> int:
    """Return the bytes that this rank will write into `tensors/` after the first step.

    Args:
        state_bytes: bytes of optimizer state for each element of a parameter.
    """
    shards = tensors.logical_tensors(model, step, mesh)
    outgoing = {name: shard.outgoing for name, shard in shards.items()}
    size = outgoing_bytes(outgoing)
    if step is None or any(name.startswith("optimizer/") for name in shards):
        return size
    # Before the first step an optimizer has no state.
    keys = [f"parameters/{n}" for n, p in model.parameters.items() if p.requires_grad]
    trained = outgoing_bytes({key: outgoing[key] for key in keys})
    return size + trained * state_bytes // 4


def warn_if_short(storage: Storage, size: int, what: str, count: int = 1) -> None:
    """Log a warning if `count` more checkpoints of `size` bytes do not fit.

    Args:
        what: the files to write, named for the message: "checkpoint global_step100".
    """
    free = None
    with suppress(OSError):
        free = storage.free_bytes()
    if free is None or free >= size * count:
        return
    needed = f"about {_text(size)}"
    if count > 1:
        needed = f"{count} x {needed}, in all {_text(size * count)}"
    _log.warning(
        "%s will need %s, and %s has %s free: free some space, or keep fewer checkpoints "
        "(checkpoint.keep_last, checkpoint.interval)",
        what,
        needed,
        storage.full_path(),
        _text(free),
    )


def warn_at_start(storage: Storage, size: int, saves: int, keep_last: int | None) -> None:
    """Log a warning if the checkpoints that a run is going to save do not fit.

    Args:
        size: bytes of a checkpoint.
        saves: the number of checkpoints of the whole run.
        keep_last: the number of newest ones that are kept. An old checkpoint is deleted after a new
            one is complete.
    """
    with suppress(OSError):
        most = saves if keep_last is None else min(saves, keep_last + 1)
        # A resumed run has some already.
        more = most - len(complete_tags(storage))
        warn_if_short(storage, size, "this run", max(1, more))


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
