"""A rank's part of a logical tensor, as torch.distributed.checkpoint wants it.

What is stored are logical tensors: by the name that they have in the unsplit model, without
padding, as if one process had written them. Each rank writes and reads only its own rows of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pipemega.parameters import Shard


@dataclass(eq=False)
class Piece:
    """The local part of one logical tensor.

    Args:
        local: where it lies here; read into in place.
        shard: which part of the logical tensor that is.
        writes: whether this rank, and no other, stores this part.
    """

    local: Tensor
    shard: Shard
    writes: bool

    def size(self) -> torch.Size:
        """Of the logical tensor; torch.distributed.checkpoint compares it with what is stored."""
        return torch.Size(self.shard.shape)

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        """Where each stretch of the local tensor lies in the logical one, and the stretch.

        Padding is in none of them; a rank that holds nothing but padding has no stretch.
        """
        shape, dim = self.shard.shape, self.shard.dim
        zeros = [0] * len(shape)
        if dim is None:
            return [(ChunkStorageMetadata(torch.Size(zeros), torch.Size(shape)), self.local)]
        chunks = []
        for start, length, offset in self.shard.pieces:
            if not length:
                continue
            offsets, sizes = zeros.copy(), list(shape)
            offsets[dim], sizes[dim] = start, length
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append((chunk, self.local.narrow(dim, offset, length)))
        return chunks

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        if not self.writes:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for chunk, part in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk, part in self._chunks():
            if chunk.offsets == index.offset:
                return part
        raise AssertionError(f"{index} is not a part that this rank holds")
