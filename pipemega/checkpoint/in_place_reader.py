"""Reads stored chunks of tensors into the memory of tensors; used by `dcp_storage`."""

import io
from typing import IO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view


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
            offset, length: of the chunk's zip file in the stream.
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
