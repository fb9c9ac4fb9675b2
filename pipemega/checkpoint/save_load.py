"""Saving a run state as a checkpoint, and opening a checkpoint to load it; collective.

Open a checkpoint by its path in one process, without the model that saved it.
"""

import io
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipemega.checkpoint import layout, manifest
from pipemega.checkpoint.layout import Retention, StoredCheckpoint, outgoing_bytes, warn_if_short
from pipemega.checkpoint.manifest import (
    STATE_FILE,
    ChecksumWriter,
    CollectiveIO,
    DamagedCheckpoint,
    FileEntry,
    Progress,
)
from pipemega.checkpoint.tensors import OutgoingShard
from pipemega.distributed.mesh import Axis
from pipemega.errors import CheckpointError, FolderLockedError, short_cause
from pipemega.lazy_imports import deferred
from pipemega.storage.filesystem import LocalStorage, Storage, storage_at

if TYPE_CHECKING:
    from pipemega.checkpoint import dcp_storage
else:
    # torch.distributed.checkpoint takes half a second, which a run without checkpoints saves.
    dcp_storage = deferred("pipemega.checkpoint.dcp_storage")

TENSORS = "tensors"
"""The folder in a checkpoint with the files of torch.distributed.checkpoint."""
CLIENT = "client.pt"

TagValidation = Literal["Warn", "Ignore", "Fail"]

_log = logging.getLogger(__name__)


@dataclass
class RunState:
    """Everything that the next step depends on.

    Args:
        tensors: this rank's shards of the tensors, by logical name.
        shared: JSON values, equal on all ranks: counters, schedules, position in the data.
        per_rank: this rank's own state, such as its RNG states, from `serialize`.
        client: the caller's state, equal on all ranks, from `serialize`.
    """

    tensors: Mapping[str, OutgoingShard]
    shared: dict[str, Any] = field(default_factory=dict)
    per_rank: bytes = b""
    client: bytes = b""


def save(
    storage: Storage,
    tag: str,
    state: RunState,
    world: Axis,
    *,
    set_latest: bool = True,
    retention: Retention | None = None,
) -> None:
    """Write the checkpoint `tag`; earlier checkpoints stay complete after any failure.

    Args:
        world: the axis of all ranks; nothing else may use its process group during the save.
        set_latest: make it the checkpoint that is loaded by default.
        retention: which old checkpoints to keep afterwards.

    Raises:
        CheckpointError: a rank could not write, for instance because the disk is full; on every
            rank, with the first cause.
        FolderLockedError: another run has taken the folder over; on every rank.
    """
    started = time.perf_counter()
    try:
        saved = _write(storage, tag, state, CollectiveIO(world, storage), set_latest)
    except FolderLockedError:
        # All files in the folder, unfinished ones too, belong to the other run.
        raise
    except CheckpointError as error:
        if world.rank == 0:
            # No rank is writing any more: free the space.
            with suppress(OSError):
                layout.delete_leftovers(storage)
        raise CheckpointError(
            f"could not save checkpoint {tag!r} in {storage.full_path()}: {error}; the earlier "
            f"checkpoints are unchanged",
            on_every_rank=True,
        ) from error
    if world.rank == 0:
        seconds = time.perf_counter() - started
        _log.info("saved %s: %s", storage.full_path(tag), throughput(saved.size, seconds))
        if retention is not None:
            layout.prune(storage, retention)


def _write(
    storage: Storage, tag: str, state: RunState, ranks: CollectiveIO, set_latest: bool
) -> StoredCheckpoint:
    """Write all files and commit them."""
    sizes = ranks.gather_to_rank0(outgoing_bytes(state.tensors))

    def begin() -> str:
        folder = layout.begin_save(storage, tag)
        # After the leftovers of interrupted saves are deleted.
        warn_if_short(storage, sum(sizes), f"checkpoint {tag}")
        return folder

    folder = ranks.run_on_rank0(begin)
    files = ChecksumWriter(storage, folder)

    def write_rank_files() -> None:
        if isinstance(storage, LocalStorage) and not (storage.root / folder).is_dir():
            raise CheckpointError(
                f"the folder {storage.full_path(folder)}, which rank 0 has just created, does not "
                f"exist here: give all ranks the same folder, on a file system that they share"
            )
        files.write(_rank_file(ranks.rank), state.per_rank)
        if ranks.is_rank0:
            files.write(CLIENT, state.client)

    ranks.run_on_all(write_rank_files)
    dcp_storage.write_shards(files, TENSORS, state.tensors, ranks)
    entries: dict[str, FileEntry] = {}
    for of_rank in ranks.gather_to_rank0(files.files):
        entries |= of_rank
    saved_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    shared = {**state.shared, "saved_at": saved_at}
    return ranks.run_on_rank0(
        lambda: layout.commit_save(storage, tag, folder, shared, entries, set_latest=set_latest)
    )


@dataclass(frozen=True)
class CheckpointReader:
    """An undamaged checkpoint that can be read.

    Args:
        found: path and state.json of the checkpoint.
        tensors: reads its tensors.
    """

    storage: Storage
    found: StoredCheckpoint
    tensors: "dcp_storage.ShardReader"

    @classmethod
    def of(cls, storage: Storage, found: StoredCheckpoint) -> "CheckpointReader":
        """Open the tensors of a checkpoint.

        Raises:
            CheckpointError: their index is missing or damaged.
        """
        return cls(storage, found, dcp_storage.ShardReader(storage, f"{found.path}/{TENSORS}"))

    @property
    def full_path(self) -> str:
        return self.storage.full_path(self.found.tag)

    def rank_state(self, rank: int) -> Any:
        """Return the state that a rank saved as `RunState.per_rank`."""
        return self._deserialize(_rank_file(rank))

    def client_state(self) -> Any:
        """Return the state that was saved as `RunState.client`."""
        return self._deserialize(CLIENT)

    def _deserialize(self, name: str) -> Any:
        path = f"{self.found.path}/{name}"
        data = self.storage.read(path)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # A damaged zip file or pickle can raise any exception.
        except Exception as error:
            raise CheckpointError(
                f"{self.storage.full_path(path)} is damaged: {short_cause(error)}"
            ) from error


def open_checkpoint(
    storage: Storage, tag: str | None, ranks: CollectiveIO, *, verify: bool
) -> CheckpointReader:
    """Open the checkpoint `tag`; without a tag the newest undamaged one, and log the damaged ones.

    Args:
        verify: compare the checksum of every file; each rank reads a part of the files.

    Raises:
        CheckpointError: `tag`, or every checkpoint, is missing, incomplete or damaged; on every
            rank.
    """
    tags, defect = ranks.run_on_rank0(
        lambda: layout.candidates(storage) if tag is None else ([tag], None)
    )
    damages: list[str] = [] if defect is None else [defect]
    for candidate in tags:
        try:
            reader = _open_if_undamaged(storage, candidate, ranks, verify)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            continue
        if damages and ranks.is_rank0:
            _log.warning("%s: loading %s instead", "; ".join(damages), reader.full_path)
        return reader
    if tag is not None:
        others = ranks.run_on_rank0(lambda: layout.describe_complete(storage, tag))
        raise CheckpointError(f"{damages[0]}; {others}", on_every_rank=True)
    error = layout.all_damaged(storage, damages)
    error.on_every_rank = True
    raise error


def _open_if_undamaged(
    storage: Storage, tag: str, ranks: CollectiveIO, verify: bool
) -> CheckpointReader:
    """Open the checkpoint `tag`; the result is the same on every rank.

    Raises:
        DamagedCheckpoint: it is missing, incomplete or damaged.
    """
    found = ranks.run_on_rank0(lambda: layout.find_checkpoint(storage, tag))
    if verify and (damage := _first_damage(storage, found, ranks)):
        raise DamagedCheckpoint(f"checkpoint {storage.full_path(tag)} is damaged: {damage}")
    return ranks.run_on_all(lambda: CheckpointReader.of(storage, found))


def _first_damage(storage: Storage, found: StoredCheckpoint, ranks: CollectiveIO) -> str | None:
    """Compare the checksums of all files, a part of them on each rank; return the first damage."""
    # The largest files first, each to the rank with the fewest bytes to read.
    loads, mine = [0] * ranks.size, []
    for name, entry in sorted(found.files.items(), key=lambda item: (-item[1].size, item[0])):
        rank = loads.index(min(loads))
        loads[rank] += entry.size
        if rank == ranks.rank:
            mine.append(name)
    damages = ranks.all_gather(damaged_files(storage, found, mine))
    return next((of_rank[0] for of_rank in damages if of_rank), None)


def damaged_files(
    storage: Storage,
    found: StoredCheckpoint,
    names: Iterable[str],
    progress: Progress | None = None,
) -> list[str]:
    """Return the files that differ from what was written, each with the difference."""
    damaged = []
    for name in names:
        path, entry = f"{found.path}/{name}", found.files[name]
        damage = manifest.file_damage(storage, path, entry, checksum=True, progress=progress)
        if damage is not None:
            damaged.append(f"{name} {damage}")
    return damaged


def agree_on_tag(tag: str, ranks: CollectiveIO, validation: TagValidation) -> str:
    """Return the tag of rank 0; collective.

    Raises:
        CheckpointError: another rank has another tag, and `validation` is "Fail".
    """
    tags = ranks.all_gather(tag)
    other = next((rank for rank, name in enumerate(tags) if name != tags[0]), None)
    if other is not None and validation != "Ignore":
        text = f"rank 0 saves the checkpoint {tags[0]!r}, and rank {other} saves {tags[other]!r}"
        if validation == "Fail":
            raise CheckpointError(
                f"{text}: give all ranks the same tag (checkpoint.tag_validation is 'Fail')",
                on_every_rank=True,
            )
        if ranks.is_rank0:
            _log.warning("%s: using %r", text, tags[0])
    return tags[0]


def serialize(value: Any) -> bytes:
    """Return tensors and plain values as a file that torch loads with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def serialize_client_state(client: Any) -> bytes:
    """Return the caller's state as bytes, after a check that loading it runs no code.

    Raises:
        CheckpointError: it contains something other than tensors and plain values.
    """
    try:
        data = serialize(client)
        torch.load(io.BytesIO(data), weights_only=True)
    # Pickling calls methods of the object, which can raise anything.
    except Exception as error:
        raise CheckpointError(
            f"client_state may contain only tensors, numbers, strings, lists, tuples, sets and "
            f"dicts, so that loading it runs no code: {short_cause(error)}"
        ) from error
    return data


def throughput(size: int, seconds: float) -> str:
    """Return for example '123 MB in 0.8 s, 150 MB/s'."""
    return f"{_bytes(size, 1)} in {seconds:.2f} s, {_bytes(size / max(seconds, 1e-9), 0)}/s"


def _bytes(number: float, decimals: int) -> str:
    # A size or a speed that is not 0 is not shown as 0 MB.
    unit, name = (1e6, "MB") if number >= 10 ** (6 - decimals) else (1e3, "kB")
    return f"{number / unit:.{decimals}f} {name}"


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def open_path(path: str, tag: str | None = None) -> CheckpointReader:
    """Return a reader of one checkpoint; sizes of files are compared, checksums are not.

    Args:
        path: a folder of checkpoints, or one checkpoint; or a URL that fsspec opens.
        tag: the checkpoint in the folder; None: the newest undamaged one.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
    """
    storage, tag = locate(path, tag)
    tag = tag or layout.newest(storage)
    if tag is None:
        raise CheckpointError(f"{storage.full_path()}: no checkpoint was saved here")
    return CheckpointReader.of(storage, layout.find_checkpoint(storage, tag))


def locate(path: str, tag: str | None = None) -> tuple[Storage, str | None]:
    """Return the folder of checkpoints, and the tag if `path` is one checkpoint.

    Raises:
        CheckpointError: the path does not exist.
    """
    path = path.rstrip("/") or "/"
    parent, _, name = path.rpartition("/")
    if tag is None and storage_at(path).size(STATE_FILE) is not None:
        return storage_at(parent or "."), name
    storage = storage_at(path)
    if not storage.exists():
        raise CheckpointError(f"no checkpoint folder {storage.full_path()!r}: is the path right?")
    return storage, tag
