"""Pieces of logical tensors to files and back, by torch.distributed.checkpoint.

Its files are what any reader of that format understands; but its index is a pickle, which may run
code when it is loaded, so that here it goes through an unpickler that knows data only.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from pipemega.checkpoint.pieces import Piece
from pipemega.errors import CheckpointError

TensorIndex = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""name -> (logical shape, dtype) of each tensor in a checkpoint."""


def write_pieces(path: Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Every rank writes its pieces into the folder `path`, and rank 0 the index; collective.

    Raises:
        CheckpointException: a rank could not; torch's own, on every rank.
    """
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet_alone():
        save(dict(pieces), storage_writer=_Writer(path), planner=planner, process_group=group)


def read_pieces(
    reader: "Reader", pieces: Mapping[str, Piece], group: dist.ProcessGroup | None
) -> None:
    """Fills the local tensors of `pieces` in place; collective.

    Raises:
        CheckpointException: a rank could not; torch's own, on every rank.
    """
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet_alone():
        load(dict(pieces), storage_reader=reader, planner=planner, process_group=group)


class Reader(FileSystemReader):
    """Reads what `write_pieces` wrote.

    Raises:
        CheckpointError: the index is missing, damaged, or holds more than data.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = _read_index(path / ".metadata")
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    @property
    def tensors(self) -> TensorIndex:
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # Without the path, which is about to be renamed, and whose class pickle knows by names
        # that differ between versions of Python.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # When a write fails, closing torch's zip file fails too, and hides what the disk said.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None


class _SavePlanner(DefaultSavePlanner):
    """Writes pieces; torch's own planner looks for tensors only."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _part(self.state_dict, index)


class _LoadPlanner(DefaultLoadPlanner):
    """Reads pieces in place, and nothing else."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # torch's own looks for tensors to make room for, and loses whatever is none.
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _part(self.state_dict, index)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # torch's own would unpickle them.
        raise CheckpointError(f"{read_item.dest_index.fqn} is stored as bytes, not as a tensor")


def _part(pieces: Mapping[str, Any], index: MetadataIndex) -> Tensor:
    piece = pieces[index.fqn]
    assert isinstance(piece, Piece)
    return piece.__get_tensor_shard__(index)


def _read_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
    # A damaged pickle can end in any error.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is damaged: it is no index of tensors")
    return metadata


class _DataUnpickler(pickle.Unpickler):
    """Makes what an index consists of, and refuses every other name.

    By whole names: a module that may be named in part offers what it has imported itself, such as
    `os.system`.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _NAMES_IN_AN_INDEX:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


_NAMES_IN_AN_INDEX = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    }
)


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """A single process without torch.distributed is what was asked for, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
