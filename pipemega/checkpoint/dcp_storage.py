"""Writing and reading shards in the file format of torch.distributed.checkpoint (DCP).

DCP plans the reads and writes, and its tools read the files. Its `FsspecWriter` and `FsspecReader`
are not used, because they compute no checksums and read `.metadata` with a plain `pickle.load`,
which can run code; listing, renaming and deleting checkpoints needs `Storage` in any case.
So DCP's `FileSystemWriter` writes into streams of `Storage`, and `.metadata` is read by an
unpickler that only creates data.

Reads stored chunks of tensors into the memory of tensors; used by `dcp_storage`.
"""

import io
import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_crc32_options, set_crc32_options

from pipemega.checkpoint.manifest import ChecksumWriter, CollectiveIO, num_readers
from pipemega.checkpoint.tensors import LocalChunks, OutgoingShard, TensorIndex, TensorShard
from pipemega.errors import CheckpointError, short_cause
from pipemega.parameters import Shard
from pipemega.storage.filesystem import LocalStorage, Storage


class _ChunkHeader(NamedTuple):
    """What precedes the data of a chunk in its zip file; equal headers describe equal tensors."""

    data: bytes
    shape: torch.Size
    dtype: torch.dtype
    is_contiguous: bool

    @classmethod
    def read(cls, stream: io.BufferedReader, offset: int, length: int) -> "_ChunkHeader":
        view = cast(IO[bytes], _create_file_view(stream, offset, length))
        chunk = torch.load(view, map_location="meta", weights_only=True)
        # torch stores the data uncompressed.
        start = chunk.untyped_storage()._checkpoint_offset
        stream.seek(offset)
        is_plain = chunk.is_contiguous() and start + chunk.nbytes <= length
        return cls(stream.read(start), chunk.shape, chunk.dtype, is_plain)


class InPlaceReader:
    """Reads chunks into the memory of tensors, without copies."""

    def __init__(self) -> None:
        # Reading a header takes torch as long as reading 5 MB; most chunks have the same.
        self._headers: dict[int, _ChunkHeader] = {}

    def read(
        self, stream: IO[bytes], offset: int, length: int, item: ReadItem, into: Tensor
    ) -> bool:
        """Read a chunk into `into`; return False if this cannot be done.

        Then `into` is unchanged, or partly read.

        Args:
            offset, length: position and size of the chunk's zip file in the stream, in bytes.
        """
        # Other streams may be remote: one read of the chunk is faster than several small ones.
        if not isinstance(stream, io.BufferedReader) or not into.is_cpu:
            return False
        header = self._headers.get(length)
        stream.seek(offset)
        if header is None or stream.read(len(header.data)) != header.data:
            try:
                header = self._headers[length] = _ChunkHeader.read(stream, offset, length)
            # The caller reports damage, and reads chunks of other formats.
            except Exception:
                return False
        same = (header.shape, header.dtype) == (into.shape, into.dtype)
        plain = header.is_contiguous and into.is_contiguous() and into.numel() > 0
        if not same or not plain or any(item.storage_offsets):
            return False
        target = into.detach().view(-1).view(torch.uint8).numpy().data
        torch.autograd.graph.increment_version(into)
        return stream.readinto(target) == into.nbytes


INDEX = ".metadata"

_WantedChunk = tuple[tuple[str, int, int], list[tuple[ReadItem, Tensor]]]
"""File, offset and length of a stored chunk; what to read of it, and into which tensors."""


def write_shards(
    files: ChecksumWriter, folder: str, shards: Mapping[str, OutgoingShard], ranks: CollectiveIO
) -> None:
    """Write the shards of every rank into `folder`, and on rank 0 the index; collective.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    planner, writer = _SavePlanner(), _ShardWriter(files, folder, ranks.rank)
    outgoing = {name: _Outgoing(shard) for name, shard in shards.items()}
    planner.set_up_planner(outgoing, is_coordinator=ranks.is_rank0)
    # No chunk is on two ranks, so a local plan does not depend on the other ranks.
    plan = planner.create_local_plan()
    results = ranks.run_on_all(lambda: writer.write(plan, planner))
    all_ranks = ranks.gather_to_rank0((plan, results))

    def write_index() -> None:
        # This also checks that the chunks of each tensor fill it and do not overlap.
        _, metadata = planner.create_global_plan([plan for plan, _ in all_ranks])
        writer.finish(metadata, [results for _, results in all_ranks])

    ranks.run_on_rank0(write_index)


class ShardReader:
    """Reads the shards that `write_shards` wrote into `folder`.

    Raises:
        CheckpointError: the index is missing, damaged, or contains something other than data.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._metadata = _read_index(storage, f"{folder}/{INDEX}")

    @property
    def tensors(self) -> TensorIndex:
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_full(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a logical tensor, or its rows [start, stop), on the CPU.

        Raises:
            CheckpointError: a chunk cannot be read.
        """
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), name
        shape, shard = tuple(entry.size), Shard(tuple(entry.size))
        if rows is not None:
            shard = Shard(shape, dim=0, ranges=(rows,))
            shape = (rows[1] - rows[0], *shape[1:])
        full = torch.empty(shape, dtype=entry.properties.dtype)
        self.read({name: TensorShard(full, shard)})
        return full

    def read(
        self, shards: Mapping[str, TensorShard], renamed: Mapping[str, str] | None = None
    ) -> None:
        """Fill the local tensors of `shards` in place, with one stored chunk in memory at a time.

        Several threads read a local file: the first use of new memory is slow.

        Args:
            renamed: key of a shard -> key of its tensor, where it is another one.

        Raises:
            CheckpointError: a chunk cannot be read.
        """
        renamed = renamed or {}
        self._read({key: shard for key, shard in shards.items() if key not in renamed})
        for key in renamed.keys() & shards.keys():
            self._read({renamed[key]: shards[key]})

    def _read(self, shards: Mapping[str, TensorShard]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        incoming = {name: _Incoming(shard) for name, shard in shards.items()}
        planner.state_dict, planner.metadata = incoming, self._metadata
        wanted = sorted(planner.create_local_plan().items, key=self._position)
        chunks = [
            (at, [(part, _narrowed(part, shards[part.dest_index.fqn].incoming)) for part in parts])
            for at, parts in itertools.groupby(wanted, key=self._position)
        ]
        in_place, copying = InPlaceReader(), threading.Lock()

        def read(some: list[_WantedChunk]) -> None:
            for file, of_file in itertools.groupby(some, key=lambda chunk: chunk[0][0]):
                with self._storage.open(f"{self._folder}/{file}") as stream:
                    for (_, offset, length), into in of_file:
                        if len(into) == 1 and in_place.read(stream, offset, length, *into[0]):
                            continue
                        with copying:
                            stream.seek(offset)
                            chunk = self._load_chunk(file, stream.read(length))
                            for part, target in into:
                                _copy_part(chunk, part, target)

        # Of other storages, chunks are copied, which one thread does at a time.
        readers = num_readers(len(chunks)) if isinstance(self._storage, LocalStorage) else 1
        bounds = [len(chunks) * reader // readers for reader in range(readers + 1)]
        with ThreadPoolExecutor(readers, thread_name_prefix="checkpoint") as pool:
            list(pool.map(read, (chunks[a:b] for a, b in itertools.pairwise(bounds))))

    def _position(self, item: ReadItem) -> tuple[str, int, int]:
        info = self._metadata.storage_data[item.storage_index]
        return info.relative_path, info.offset, info.length

    def _load_chunk(self, file: str, data: bytes) -> Tensor:
        where = self._storage.full_path(f"{self._folder}/{file}")
        try:
            chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # A damaged zip file or pickle can raise any exception.
        except Exception as error:
            raise CheckpointError(f"{where} is damaged: {short_cause(error)}") from error
        if not isinstance(chunk, Tensor):
            raise CheckpointError(
                f"{where} is damaged: it contains a {type(chunk).__name__}, not a tensor"
            )
        return chunk


@torch.no_grad()
def _copy_part(chunk: Tensor, item: ReadItem, into: Tensor) -> None:
    for dim, length in enumerate(item.lengths):
        chunk = chunk.narrow(dim, item.storage_offsets[dim], length)
    into.copy_(chunk)


def _narrowed(item: ReadItem, incoming: LocalChunks) -> Tensor:
    """Return the part of a local tensor that `item` reads."""
    into = _chunk_at(item.dest_index, incoming)
    for dim, length in enumerate(item.lengths):
        into = into.narrow(dim, item.dest_offsets[dim], length)
    return into


def _chunk_at(index: MetadataIndex, chunks: LocalChunks) -> Tensor:
    assert index.offset is not None, "every chunk has an offset"
    return chunks[index.offset]


class _Outgoing:
    """An `OutgoingShard` with the methods from which DCP plans writes."""

    def __init__(self, shard: OutgoingShard) -> None:
        self.shard = shard

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, part.shape),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.shard.shape,
                ),
            )
            for offsets, part in self.shard.chunks.items()
        ]


class _Incoming:
    """A `TensorShard` with the methods from which DCP plans reads."""

    def __init__(self, shard: TensorShard) -> None:
        self._shard = shard

    def size(self) -> torch.Size:
        """Return the shape of the logical tensor, which DCP compares with the stored one."""
        return self._shard.size()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets, part.shape)
            for offsets, part in self._shard.incoming.items()
        ]


class _SavePlanner(DefaultSavePlanner):
    """Plans writes of `_Outgoing`; DCP's own planner only looks up tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _chunk_at(index, self.state_dict[index.fqn].shard.chunks)


class _ShardWriter(FileSystemWriter):
    """DCP's file writer, writing into the streams of a `ChecksumWriter`."""

    def __init__(self, files: ChecksumWriter, folder: str, rank: int) -> None:
        # `Storage.create` syncs the files.
        super().__init__(folder, sync_files=False)
        self.fs = _ChecksumFileSystem(files)
        self.path = folder
        self._files, self._rank = files, rank

    def write(self, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
        # As `set_up_storage_writer` does in torch 2.11, and the global plan in torch 2.8.
        self.rank, self.use_collectives = self._rank, False
        prefix = _StoragePrefix(f"__{self._rank}_")
        plan = replace(self.prepare_local_plan(plan), storage_data=prefix)
        computes_crc32 = get_crc32_options()
        # The manifest has checksums of the whole file; no reader of torch compares torch's own.
        set_crc32_options(False)
        try:
            results: list[WriteResult] = self.write_data(plan, planner).wait()
        except RuntimeError as error:
            # When a write fails, closing torch's zip file fails too, and hides the OSError.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None
        finally:
            set_crc32_options(computes_crc32)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        # Without the path: the folder is renamed later, and the class of a path is pickled under
        # names that differ between versions of Python.
        metadata.storage_meta = StorageMeta(save_id=self.save_id)
        self._files.write(f"{self.path}/{INDEX}", pickle.dumps(metadata))


class _ChecksumFileSystem(FileSystem):
    """The file operations of DCP's writer, in a folder where every file is new."""

    def __init__(self, files: ChecksumWriter) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "only DCP's writer uses this"
        with self._files.create(path) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    def exists(self, path: Any) -> bool:
        return False

    def mkdir(self, path: Any) -> None:
        """Do nothing: `Storage.create` creates the folder."""


def _read_index(storage: Storage, path: str) -> Metadata:
    try:
        with storage.open(path) as file:
            metadata = _DataUnpickler(file).load()
    # A damaged pickle can raise any exception.
    except Exception as error:
        raise CheckpointError(f"{storage.full_path(path)} is damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{storage.full_path(path)} is damaged: it is not a tensor index")
    return metadata


class _DataUnpickler(pickle.Unpickler):
    """Creates the classes that an index contains, and refuses every other name.

    The list has full names: an allowed module would also offer the names that it has imported,
    such as `os.system`.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _NAMES_IN_AN_INDEX:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which no index needs")
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
