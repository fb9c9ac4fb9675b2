"""Saves and loads the state of a run; collective over all ranks."""

import io
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

import torch

from pipemega.checkpoint import folder as folders
from pipemega.checkpoint.agreement import Agreement, essence
from pipemega.checkpoint.disk import Disk, LocalDisk
from pipemega.checkpoint.folder import Found, Retention
from pipemega.checkpoint.manifest import Damage, FileEntry, Progress, Written, difference
from pipemega.checkpoint.pieces import Outgoing, Piece
from pipemega.checkpoint.storage import Reader, write_pieces
from pipemega.errors import CheckpointError
from pipemega.mesh import Axis

TENSORS = "tensors"
"""The folder of a checkpoint in which the files of torch.distributed.checkpoint are."""
CLIENT = "client.pt"

TagValidation = Literal["Warn", "Ignore", "Fail"]

_log = logging.getLogger(__name__)


@dataclass
class RunState:
    """Everything that the next step depends on.

    Args:
        tensors: by logical names.
        shared: JSON values, the same on every rank: counters, schedules, position in the data.
        own: what each rank has for itself, in bytes of `packed`: its random streams.
        client: the caller's own, the same on every rank, in bytes of `packed`.
    """

    tensors: Mapping[str, Outgoing]
    shared: dict[str, Any] = field(default_factory=dict)
    own: bytes = b""
    client: bytes = b""


def save(
    disk: Disk,
    tag: str,
    state: RunState,
    world: Axis,
    *,
    point: bool = True,
    retention: Retention | None = None,
) -> None:
    """Writes the checkpoint `tag`; the ones before stay whole whatever happens.

    Args:
        world: all ranks, in a group that nobody else talks over meanwhile.
        point: make it the one that is loaded by default.
        retention: what is deleted once it is there.

    Raises:
        CheckpointError: a rank could not write, for instance because the disk is full; on every
            rank, with the first cause.
    """
    started = time.perf_counter()
    try:
        found = _write(disk, tag, state, Agreement(world, disk), point)
    except CheckpointError as error:
        if world.rank == 0:
            # Nobody writes any more: the space is free again.
            with suppress(OSError):
                folders.tidy(disk)
        raise CheckpointError(
            f"could not save checkpoint {tag!r} in {disk.where()}: {error}; the checkpoints "
            f"before it are whole",
            on_every_rank=True,
        ) from error
    if found is not None:
        _log.info("saved %s: %s", disk.where(tag), rate(found.size, time.perf_counter() - started))
        if retention is not None:
            folders.prune(disk, retention)


def _write(disk: Disk, tag: str, state: RunState, agree: Agreement, point: bool) -> Found | None:
    """The checkpoint that came of it, on rank 0."""
    part = agree.from_first(lambda: folders.start(disk, tag))
    written = Written(disk, part)

    def write_own() -> None:
        if isinstance(disk, LocalDisk) and not (disk.root / part).is_dir():
            raise CheckpointError(
                f"there is no folder {disk.where(part)} here, which rank 0 has just made: give "
                f"all ranks the same folder, on a file system that they share"
            )
        written.write(_own_file(agree.rank), state.own)
        if agree.is_first:
            written.write(CLIENT, state.client)

    agree.together(write_own)
    write_pieces(written, TENSORS, state.tensors, agree)
    files: dict[str, FileEntry] = {}
    for of_rank in agree.to_first(written.files):
        files |= of_rank
    saved_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    shared = {**state.shared, "saved_at": saved_at}
    finished: list[Found] = []

    def finish() -> None:
        finished.append(folders.finish(disk, tag, part, shared, files, point=point))

    agree.from_first(finish)
    return finished[0] if finished else None


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is whole, and may be read.

    Args:
        found: where it is, and what it says of itself.
        tensors: what reads its tensors.
    """

    disk: Disk
    found: Found
    tensors: Reader

    @property
    def where(self) -> str:
        return self.disk.where(self.found.tag)

    def own(self, rank: int) -> Any:
        """What `packed` was given for `RunState.own` on this rank."""
        return self._unpacked(_own_file(rank))

    def client(self) -> Any:
        """What `packed` was given for `RunState.client`."""
        return self._unpacked(CLIENT)

    def _unpacked(self, name: str) -> Any:
        path = f"{self.found.path}/{name}"
        data = self.disk.read(path)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # A damaged zip file or pickle can end in any error.
        except Exception as error:
            raise CheckpointError(
                f"{self.disk.where(path)} is damaged: {essence(error)}"
            ) from error


def choose(disk: Disk, tag: str | None, agree: Agreement, *, verify: bool) -> Opened:
    """The checkpoint `tag`; without one the newest that is whole, with a warning if others are not.

    Args:
        verify: read every file, shared out over the ranks, and compare its sum.

    Raises:
        CheckpointError: `tag`, or all there are, is missing, incomplete or damaged; on every rank.
    """
    tags, wrong = agree.from_first(
        lambda: folders.candidates(disk) if tag is None else ([tag], None)
    )
    damages: list[str] = [] if wrong is None else [wrong]
    for candidate in tags:
        try:
            opened = _opened(disk, candidate, agree, verify)
        except Damage as damage:
            damages.append(str(damage))
            continue
        if damages and agree.is_first:
            _log.warning("%s: loading %s instead", "; ".join(damages), opened.where)
        return opened
    if tag is not None:
        others = agree.from_first(lambda: folders.there(disk, tag))
        raise CheckpointError(f"{damages[0]}; {others}", on_every_rank=True)
    error = folders.none_whole(disk, damages)
    error.on_every_rank = True
    raise error


def _opened(disk: Disk, tag: str, agree: Agreement, verify: bool) -> Opened:
    """The checkpoint `tag`; on every rank alike it is, or is not.

    Raises:
        Damage: it is not whole.
    """

    def examined() -> Found | str:
        try:
            return folders.examine(disk, tag)
        except Damage as damage:
            return str(damage)

    found = agree.from_first(examined)
    if isinstance(found, str):
        raise Damage(found)
    if verify and (wrong := _damaged_file(disk, found, agree)):
        raise Damage(f"checkpoint {disk.where(tag)} is damaged: {wrong}")
    reader = agree.together(lambda: Reader(disk, f"{found.path}/{TENSORS}"))
    return Opened(disk, found, reader)


def _damaged_file(disk: Disk, found: Found, agree: Agreement) -> str | None:
    """The first file that is not what was written, each rank having read its share of them."""
    # The largest first, each to the rank with least to read.
    loads, mine = [0] * agree.size, []
    for name, entry in sorted(found.files.items(), key=lambda item: (-item[1].size, item[0])):
        rank = loads.index(min(loads))
        loads[rank] += entry.size
        if rank == agree.rank:
            mine.append(name)
    of_ranks = agree.gather(damaged_files(disk, found, mine))
    return next((wrongs[0] for wrongs in of_ranks if wrongs), None)


def damaged_files(
    disk: Disk, found: Found, names: Iterable[str], progress: Progress | None = None
) -> list[str]:
    """Which of these files are not what was written, and in what."""
    damaged = []
    for name in names:
        path, entry = f"{found.path}/{name}", found.files[name]
        wrong = difference(disk, path, entry, read=True, progress=progress)
        if wrong is not None:
            damaged.append(f"{name} {wrong}")
    return damaged


def read(opened: Opened, pieces: Mapping[str, Piece], agree: Agreement) -> None:
    """Fills the local tensors of `pieces`; collective.

    Raises:
        CheckpointError: a rank could not; on every rank.
    """
    agree.together(lambda: opened.tensors.read(pieces))


def one_tag(tag: str, agree: Agreement, validation: TagValidation) -> str:
    """The tag of rank 0; collective.

    Raises:
        CheckpointError: another rank has another, and `validation` is "Fail".
    """
    tags = agree.gather(tag)
    other = next((rank for rank, name in enumerate(tags) if name != tags[0]), None)
    if other is not None and validation != "Ignore":
        text = f"rank 0 saves the checkpoint {tags[0]!r}, and rank {other} saves {tags[other]!r}"
        if validation == "Fail":
            raise CheckpointError(
                f"{text}: give all ranks the same tag (checkpoint.tag_validation is 'Fail')",
                on_every_rank=True,
            )
        if agree.is_first:
            _log.warning("%s: it is saved as %r", text, tags[0])
    return tags[0]


def packed(value: Any) -> bytes:
    """Tensors and plain values, as a file that torch loads with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def packed_client(client: Any) -> bytes:
    """The caller's state, if it can be loaded again without running code.

    Raises:
        CheckpointError: it holds something else than tensors and plain values.
    """
    try:
        data = packed(client)
        torch.load(io.BytesIO(data), weights_only=True)
    # Pickle lets through whatever the object itself raises.
    except Exception as error:
        raise CheckpointError(
            f"client_state may hold tensors, numbers, strings, lists, tuples, sets and dicts, so "
            f"that loading it can run no code; it holds something else: {essence(error)}"
        ) from error
    return data


def rate(size: int, seconds: float) -> str:
    """123 MB in 0.8 s, 150 MB/s"""
    return f"{size / 1e6:.1f} MB in {seconds:.2f} s, {size / 1e6 / max(seconds, 1e-9):.0f} MB/s"


def _own_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
