"""Pieces of logical tensors to files and back, in the format of torch.distributed.checkpoint.

What is cut how, and what is read from where, is planned by torch, and its files are what any
reader of that format understands. Its index is a pickle, which may run code when it is loaded, so
that here it goes through an unpickler that knows data only.
"""

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from pipemega.checkpoint.agreement import Agreement, essence
from pipemega.checkpoint.disk import Disk
from pipemega.checkpoint.manifest import Written
from pipemega.checkpoint.pieces import Outgoing, Piece
from pipemega.errors import CheckpointError

TensorIndex = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""name -> (logical shape, dtype) of each tensor in a checkpoint."""

INDEX = ".metadata"


def write_pieces(
    written: Written, folder: str, pieces: Mapping[str, Outgoing], agree: Agreement
) -> None:
    """Every rank writes its pieces into `folder`, and rank 0 the index; collective.

    Raises:
        CheckpointError: a rank could not; on every rank.
    """
    planner, writer = _SavePlanner(), _Writer(written, folder, agree.rank)
    planner.set_up_planner(dict(pieces), is_coordinator=agree.is_first)
    # What a rank writes no other one does: its plan depends on nobody's.
    plan = planner.create_local_plan()
    results = agree.together(lambda: writer.write(plan, planner))
    everybody = agree.to_first((plan, results))

    def finish() -> None:
        # Torch sees to it that the chunks of each tensor fill it, and do not overlap.
        _, metadata = planner.create_global_plan([plan for plan, _ in everybody])
        writer.finish(metadata, [results for _, results in everybody])

    agree.from_first(finish)


class Reader:
    """Reads what `write_pieces` wrote into `folder`.

    Raises:
        CheckpointError: the index is missing, damaged, or holds more than data.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder = disk, folder
        self._metadata = _read_index(disk, f"{folder}/{INDEX}")

    @property
    def tensors(self) -> TensorIndex:
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Fills the local tensors of `pieces` in place, holding one stored chunk at a time.

        Raises:
            CheckpointError: a chunk cannot be read.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.state_dict, planner.metadata = dict(pieces), self._metadata
        wanted = sorted(planner.create_local_plan().items, key=self._place)
        for file, items in itertools.groupby(wanted, key=lambda item: self._place(item)[0]):
            with self._disk.open(f"{self._folder}/{file}") as stream:
                for (_, offset, length), parts in itertools.groupby(items, key=self._place):
                    stream.seek(offset)
                    chunk = self._chunk(file, stream.read(length))
                    for part in parts:
                        _fill(pieces, part, chunk)

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        info = self._metadata.storage_data[item.storage_index]
        return info.relative_path, info.offset, info.length

    def _chunk(self, file: str, data: bytes) -> Tensor:
        where = self._disk.where(f"{self._folder}/{file}")
        try:
            chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # A damaged zip file or pickle can end in any error.
        except Exception as error:
            raise CheckpointError(f"{where} is damaged: {essence(error)}") from error
        if not isinstance(chunk, Tensor):
            raise CheckpointError(f"{where} is damaged: a {type(chunk).__name__} is no tensor")
        return chunk


@torch.no_grad()
def _fill(pieces: Mapping[str, Piece], item: ReadItem, chunk: Tensor) -> None:
    into = pieces[item.dest_index.fqn].__get_tensor_shard__(item.dest_index)
    for dim, length in enumerate(item.lengths):
        chunk = chunk.narrow(dim, item.storage_offsets[dim], length)
        into = into.narrow(dim, item.dest_offsets[dim], length)
    into.copy_(chunk)


class _SavePlanner(DefaultSavePlanner):
    """Writes pieces; torch's own planner looks for tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        piece = self.state_dict[index.fqn]
        assert isinstance(piece, Outgoing)
        return piece.__get_tensor_shard__(index)


class _Writer(FileSystemWriter):
    """torch's writer of files, into streams of ours."""

    def __init__(self, written: Written, folder: str, rank: int) -> None:
        # The streams see to it that what was written is on the disk.
        super().__init__(folder, sync_files=False)
        self.fs: FileSystemBase = _Streams(written)  # type: ignore[assignment]
        self.path = folder
        self._written, self._rank = written, rank

    def write(self, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
        self.set_up_storage_writer(self._rank == 0, rank=self._rank, use_collectives=False)
        plan = self.prepare_local_plan(plan)
        try:
            results: list[WriteResult] = self.write_data(plan, planner).wait()
        except RuntimeError as error:
            # When a write fails, closing torch's zip file fails too, and hides what the disk said.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        # Without the path, which is about to be renamed, and whose class pickle knows by names
        # that differ between versions of Python.
        metadata.storage_meta = StorageMeta(save_id=self.save_id)
        self._written.write(f"{self.path}/{INDEX}", pickle.dumps(metadata))


class _Streams(FileSystemBase):
    """What torch's writer asks of a file system, where every file is new."""

    def __init__(self, written: Written) -> None:
        self._written = written

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "it writes"
        with self._written.create(path) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    def exists(self, path: Any) -> bool:
        return False

    def mkdir(self, path: Any) -> None:
        """There is a folder, or none is needed."""

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        raise AssertionError("nothing of ours is renamed file by file")

    def rm_file(self, path: Any) -> None:
        raise AssertionError("nothing of ours is deleted file by file")

    def ls(self, path: Any) -> list[str]:
        raise AssertionError("nothing of ours is listed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _read_index(disk: Disk, path: str) -> Metadata:
    try:
        with disk.open(path) as file:
            metadata = _DataUnpickler(file).load()
    # A damaged pickle can end in any error.
    except Exception as error:
        raise CheckpointError(f"{disk.where(path)} is damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{disk.where(path)} is damaged: it is no index of tensors")
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
