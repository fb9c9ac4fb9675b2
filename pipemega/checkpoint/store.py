"""Saves and loads the state of a run; collective over all ranks."""

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from pipemega.checkpoint import folder as folders
from pipemega.checkpoint.agreement import Agreement, essence
from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.storage import Reader, TensorIndex, read_pieces, write_pieces
from pipemega.errors import CheckpointError
from pipemega.mesh import Mesh

TENSORS = "tensors"
"""The folder of a checkpoint in which torch.distributed.checkpoint keeps its files."""
CLIENT = "client.pt"

TagValidation = Literal["Warn", "Ignore", "Fail"]

_log = logging.getLogger(__name__)


@dataclass
class RunState:
    """Everything that the next step depends on.

    Args:
        tensors: by logical names.
        shared: JSON values, the same on every rank: counters, schedules, position in the data.
        own: tensors and plain values of each rank: its random streams.
        client: the caller's own, the same on every rank: tensors and plain values.
    """

    tensors: dict[str, Piece]
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    client: Any = None


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says of itself before its tensors are read.

    Args:
        shared: see `RunState`.
        tensors: name -> (logical shape, dtype).
    """

    shared: dict[str, Any]
    tensors: TensorIndex


def save(
    folder: Path,
    tag: str,
    state: RunState,
    mesh: Mesh,
    *,
    tag_validation: TagValidation = "Warn",
    point: bool = True,
) -> Path:
    """Writes the checkpoint `tag`; the ones before stay whole whatever happens.

    Args:
        tag_validation: what to do when ranks come with different tags; unless that is an error,
            the tag of rank 0 counts.
        point: make it the one that is loaded by default.

    Raises:
        CheckpointError: a rank could not write, for instance because the disk is full; on every
            rank, with the first cause.
    """
    tag = _one_tag(tag, Agreement(mesh.world, folder), tag_validation)
    try:
        _write(folder, tag, state, mesh, point)
    except CheckpointError as error:
        if mesh.rank == 0:
            # Nobody writes any more: the space is free again.
            with suppress(OSError):
                folders.tidy(folder)
        raise CheckpointError(
            f"could not save checkpoint {tag!r} in {folder}: {error}; the checkpoints before it "
            f"are whole",
            on_every_rank=True,
        ) from error
    return folder / tag


def _write(folder: Path, tag: str, state: RunState, mesh: Mesh, point: bool) -> None:
    agree = Agreement(mesh.world, folder)
    client = agree.together(lambda: _client_bytes(state.client) if mesh.rank == 0 else b"")
    part = folder / agree.from_first(lambda: folders.start(folder, tag)).name

    def write_own() -> None:
        if not part.is_dir():
            raise CheckpointError(
                f"there is no folder {part} here, which rank 0 has just made: give all ranks the "
                f"same folder, on a file system that they share"
            )
        folders.write(part / _own_file(mesh.rank), _to_bytes(state.own))
        if mesh.rank == 0:
            folders.write(part / CLIENT, client)

    agree.together(write_own)
    with agree.on_torch_errors():
        write_pieces(part / TENSORS, state.tensors, mesh.world.group)
    shared = {**state.shared, "mesh": str(mesh.topology)}
    agree.from_first(lambda: folders.finish(folder, tag, shared, point=point))


def load(
    folder: Path, tag: str | None, mesh: Mesh, into: Callable[[Stored], dict[str, Piece]]
) -> tuple[Path, RunState]:
    """Reads the checkpoint `tag`, or the newest.

    Nothing is read into a tensor of the run before all of this is known to fit.

    Args:
        into: from what is stored to the tensors to read; they are read in place.

    Returns:
        the checkpoint's folder, and its state; without `into`'s tensors, all on the CPU.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of another model or of another mesh;
            on every rank.
    """

    def look() -> tuple[str, dict[str, Any]]:
        found = folders.find(folder, tag)
        return found.name, folders.read_state(found)

    agree = Agreement(mesh.world, folder)
    name, shared = agree.from_first(look)
    path = folder / name
    if shared["mesh"] != str(mesh.topology):
        raise CheckpointError(
            f"{path} was saved on the mesh {shared['mesh']}, and this run has {mesh.topology}; "
            f"loading on another mesh is not here yet: start as many ranks as then, and set the "
            f"section mesh as it was",
            on_every_rank=True,
        )
    reader = agree.together(lambda: Reader(path / TENSORS))
    stored = Stored(shared, reader.tensors)
    pieces = agree.together(lambda: into(stored))
    _compare(path, stored, pieces, mesh, agree)
    own = agree.together(lambda: _read_pt(path / _own_file(mesh.rank)))
    client = agree.together(lambda: _read_pt(path / CLIENT))
    with agree.on_torch_errors():
        read_pieces(reader, pieces, mesh.world.group)
    return path, RunState(pieces, shared, own, client)


def _one_tag(tag: str, agree: Agreement, validation: TagValidation) -> str:
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


def _compare(
    path: Path, stored: Stored, pieces: Mapping[str, Piece], mesh: Mesh, agree: Agreement
) -> None:
    """Refuses a checkpoint of another model, with the first differences; collective."""
    mine = {name: tuple(piece.size()) for name, piece in pieces.items()}
    replica = mesh.data.rank > 0 or mesh.tensor.rank > 0
    here: dict[str, tuple[int, ...]] = {}
    for part in agree.gather({} if replica else mine):
        here |= part
    # What an optimizer keeps is taken as it is stored: it decides for itself.
    there = {
        name: shape
        for name, (shape, _) in stored.tensors.items()
        if not name.startswith("optimizer/")
    }
    differences = [
        f"{name} is {_shape(here.get(name))} here and {_shape(there.get(name))} there"
        for name in {**here, **there}
        if here.get(name) != there.get(name) and not name.startswith("optimizer/")
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(differences[:3])}{more}. Build the model as "
            f"it was when this was saved",
            on_every_rank=True,
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _own_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _client_bytes(client: Any) -> bytes:
    """The caller's state, if it can be loaded again without running code.

    Raises:
        CheckpointError: it holds something else than tensors and plain values.
    """
    try:
        data = _to_bytes(client)
        torch.load(io.BytesIO(data), weights_only=True)
    # Pickle lets through whatever the object itself raises.
    except Exception as error:
        raise CheckpointError(
            f"client_state may hold tensors, numbers, strings, lists, tuples, sets and dicts, so "
            f"that loading it can run no code; it holds something else: {essence(error)}"
        ) from error
    return data


def _read_pt(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # A damaged zip file or pickle can end in any error.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {essence(error)}") from error
