"""Saves and loads the state of a run; collective over all ranks."""

import io
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from pipemega.checkpoint import folder as folders
from pipemega.checkpoint.pieces import Piece, nbytes
from pipemega.errors import CheckpointError
from pipemega.mesh import Mesh

TENSORS = "tensors"
"""The folder of a checkpoint in which torch.distributed.checkpoint keeps its files."""


@dataclass
class RunState:
    """Everything that the next step depends on.

    Args:
        tensors: by logical names.
        shared: plain values, the same on every rank: counters, schedules, position in the data.
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
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Report:
    """What a save or load did."""

    path: Path
    seconds: float
    bytes_of_this_rank: int


def save(folder: Path, tag: str, state: RunState, mesh: Mesh, *, point: bool = True) -> Report:
    """Writes the checkpoint `tag`; the ones before stay whole whatever happens.

    Raises:
        CheckpointError: a rank could not write, for instance because the disk is full; on every
            rank, with the first cause.
    """
    started = time.perf_counter()
    client = _client_bytes(state.client)
    part = folders.part_of(folder, tag)

    def write() -> None:
        (part / f"rank_{mesh.rank:05d}.pt").write_bytes(_to_bytes(state.own))
        if mesh.rank == 0:
            (part / "client.pt").write_bytes(client)

    if mesh.rank == 0:
        _together(mesh, "save", tag, lambda: folders.start(folder, tag))
    else:
        _together(mesh, "save", tag, lambda: None)
    _together(mesh, "save", tag, write)
    with _as_checkpoint_error("save", tag):
        write_tensors(
            dict(state.tensors),
            storage_writer=FileSystemWriter(part / TENSORS, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=mesh.world.size == 1,
        )
    shared = {**state.shared, "mesh": str(mesh.topology), "format": 1}
    _together(
        mesh,
        "save",
        tag,
        lambda: folders.finish(folder, tag, shared, point=point) if mesh.rank == 0 else None,
    )
    return Report(folder / tag, time.perf_counter() - started, nbytes(state.tensors))


def load(
    folder: Path, tag: str | None, mesh: Mesh, into: Callable[[Stored], dict[str, Piece]]
) -> tuple[Report, RunState]:
    """Reads the checkpoint `tag`, or the newest.

    Args:
        into: from what is stored to the tensors to read; they are read in place.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of another model or of another mesh.
    """
    started = time.perf_counter()
    path = folders.find(folder, tag)
    shared = folders.read_state(path)
    if shared["mesh"] != str(mesh.topology):
        raise CheckpointError(
            f"{path} was saved on the mesh {shared['mesh']}, and this run has {mesh.topology}: "
            f"start as many ranks, and set the sections mesh and pipeline as they were"
        )
    reader = _Reader(path / TENSORS)
    stored = Stored(shared, _tensors_of(reader.read_metadata()))
    pieces = into(stored)
    _compare(path, stored, pieces)
    with _as_checkpoint_error("load", path.name):
        read_tensors(
            dict(pieces),
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=mesh.world.size == 1,
        )
    own = torch.load(path / f"rank_{mesh.rank:05d}.pt", weights_only=True)
    client = torch.load(path / "client.pt", weights_only=True)
    report = Report(path, time.perf_counter() - started, nbytes(pieces))
    return report, RunState(pieces, shared, own, client)


def _tensors_of(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _compare(path: Path, stored: Stored, pieces: Mapping[str, Piece]) -> None:
    """Refuses a checkpoint of another model, with the first differences."""
    shapes = {name: shape for name, (shape, _) in stored.tensors.items()}
    wrong = [
        f"{name} is {list(piece.size())} here and "
        + (f"{list(shapes[name])} there" if name in shapes else "not there")
        for name, piece in pieces.items()
        if shapes.get(name) != tuple(piece.size())
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(wrong[:3])}{more}. Set the section model as "
            f"it was when this was saved"
        )


def _together(mesh: Mesh, verb: str, tag: str, action: Callable[[], object]) -> None:
    """Runs `action` on this rank; if it fails on any, all raise the first rank's cause."""
    failure: str | None = None
    try:
        action()
    except CheckpointError as error:
        failure = f"rank {mesh.rank}: {error}"
    except OSError as error:
        failure = f"rank {mesh.rank}: {error.strerror or error} ({error.filename or 'a file'})"
    failures: list[str | None] = [failure]
    if mesh.world.size > 1:
        failures = [None] * mesh.world.size
        dist.all_gather_object(failures, failure, group=mesh.world.group)
    first = next((text for text in failures if text is not None), None)
    if first is not None:
        raise CheckpointError(
            f"could not {verb} checkpoint {tag!r}: {first}; the checkpoints before it are whole"
        )


class _as_checkpoint_error:
    """Turns what torch.distributed.checkpoint raises, on all ranks alike, into one sentence."""

    def __init__(self, verb: str, tag: str) -> None:
        self._verb, self._tag = verb, tag

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception | CheckpointException):
            return
        cause: BaseException = error
        where = ""
        if isinstance(error, CheckpointException) and error.failures:
            rank, (cause, _) = next(iter(sorted(error.failures.items())))
            where = f"rank {rank}: "
        keep = "; the checkpoints before it are whole" if self._verb == "save" else ""
        raise CheckpointError(
            f"could not {self._verb} checkpoint {self._tag!r}: {where}{type(cause).__name__}: "
            f"{cause}{keep}"
        ) from error


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _client_bytes(client: Any) -> bytes:
    """The caller's state, if it can be loaded again without running code.

    Raises:
        CheckpointError: it holds something else than tensors and plain values.
    """
    data = _to_bytes(client)
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "client_state may hold tensors, numbers, strings, lists, tuples and dicts, so that "
            f"loading it can run no code; it holds something else: {str(error).splitlines()[0]}"
        ) from error
    return data


class _Reader(FileSystemReader):
    """Reads the index of a checkpoint without letting it run code, as pickle by itself would."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        assert isinstance(metadata, Metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        data_only = module == "torch.distributed.checkpoint.metadata" or (module, name) in _HARMLESS
        if not data_only:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


_HARMLESS = frozenset(
    {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        *(("torch", str(d).removeprefix("torch.")) for d in (torch.float32, torch.float64)),
    }
)
