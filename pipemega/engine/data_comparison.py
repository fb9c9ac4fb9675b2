"""Compares what the ranks have read: all pipeline and tensor ranks of a data rank read the same."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Mesh
from pipemega.errors import DataError

# The first calls are always compared, then one of `every`.
_FIRST_CALLS = 3

_PARTS = ("inputs", "labels")

_REMEDY = (
    "all pipeline and tensor ranks of a data rank must read the same. Give them the same files, "
    "and the same seed for what they shuffle or draw before reading. Random numbers in "
    "__getitem__, __iter__ or collate_fn must come from the default generators of torch, numpy or "
    "random, which are seeded for each sample of training_data, or from a generator that is seeded "
    "with the index of the sample. If the difference is intended, set data.compare_every to 0"
)


class DataComparison:
    """Compares hashes of the micro-batches that the ranks have read.

    Args:
        mesh: all its ranks take part.
        every: how often to compare, in calls; 0: never.
        caller: the method that reads, for messages.
    """

    def __init__(self, mesh: Mesh, every: int, caller: str) -> None:
        self._mesh, self._every, self._caller = mesh, every, caller
        self._calls = 0

    def check(
        self,
        pairs: Sequence[Any] | None,
        num_microbatches: int,
        *,
        must_differ: bool = False,
        inputs_may_differ: bool = False,
    ) -> None:
        """Compare the data of one call, if it is due; collective.

        Args:
            pairs: the (inputs, labels) that this rank has read; None if it reads no data.
            num_microbatches: of the call; the same on every rank.
            must_differ: equal data on two data ranks is an error too.
            inputs_may_differ: between stages, of which only the first uses them; on this rank.

        Raises:
            DataError: ranks have read different data; on every rank.
        """
        call, self._calls = self._calls, self._calls + 1
        due = self._every and (call < _FIRST_CALLS or call % self._every == 0)
        if not due or self._mesh.world.size == 1:
            return
        hashes = np.zeros((num_microbatches, 2), np.int64)
        if pairs is not None:
            for row, pair in zip(hashes, pairs, strict=False):
                row[:] = [_hash(part) for part in pair]
        if inputs_may_differ and self._mesh.pipeline.rank > 0:
            hashes[:, 0] = 0
        own, world = torch.from_numpy(hashes), self._mesh.world
        gathered = [torch.empty_like(own) for _ in world.ranks]
        dist.all_gather(gathered, own, group=world.group)
        by_rank = torch.stack(gathered).numpy()  # [ranks, micro-batches, parts]
        for part, name in enumerate(_PARTS):
            self._refuse_differences(by_rank[:, :, part], name)
        if must_differ:
            self._refuse_equal_data_ranks(by_rank[:, :, 0])

    def _refuse_differences(self, hashes: npt.NDArray[np.int64], name: str) -> None:
        """Compare each rank with the first one of its data rank that has this part."""
        topology = self._mesh.topology
        first_of: dict[int, int] = {}
        for rank in np.flatnonzero(hashes.any(axis=1)).tolist():
            first = first_of.setdefault(topology.coordinate(rank).data, rank)
            wrong = np.flatnonzero(hashes[rank] != hashes[first])
            if len(wrong):
                raise DataError(
                    f"{self._describe(first)} and {self._describe(rank)} have read different "
                    f"{name} in call {self._calls} of {self._caller}: {len(wrong)} of "
                    f"{hashes.shape[1]} micro-batches differ, the first is micro-batch {wrong[0]}; "
                    f"{_REMEDY}",
                    on_every_rank=True,
                )

    def _refuse_equal_data_ranks(self, inputs: npt.NDArray[np.int64]) -> None:
        """Refuse equal inputs of a micro-batch on two data ranks.

        One is enough: the random numbers of later micro-batches differ between data ranks.
        """
        topology = self._mesh.topology
        ranks = [topology.rank(0, data, 0) for data in range(topology.data)]
        for data, rank in enumerate(ranks):
            for earlier in range(data):
                same = (inputs[rank] == inputs[ranks[earlier]]) & (inputs[rank] != 0)
                if not same.any():
                    continue
                raise DataError(
                    f"data ranks {earlier} and {data} have read the same data in call "
                    f"{self._calls} of {self._caller}: the DataLoader must give each data rank "
                    "other samples. Its sampler or dataset should use mesh.data.rank and "
                    "mesh.data.size of mesh = pipemega.build_mesh(pipemega.load_config(config))",
                    on_every_rank=True,
                )

    def _describe(self, rank: int) -> str:
        place = self._mesh.topology.coordinate(rank)
        axes = f"pipeline rank {place.pipeline}, tensor rank {place.tensor}"
        return f"rank {rank} ({axes})"


def _hash(part: Any) -> int:
    """Return a 64-bit hash of the tensors, arrays, numbers and texts of a pytree; 0: it has none.

    Objects of other classes are ignored: equal ones may differ in memory.
    """
    digest, is_empty = hashlib.blake2b(digest_size=8), True
    for leaf in pytree.tree_leaves(part):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(raw.data)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).data)
        elif isinstance(leaf, int | float | str | bytes):
            digest.update(repr(leaf).encode())
        else:
            continue
        is_empty = False
    return 0 if is_empty else int.from_bytes(digest.digest(), "little", signed=True) or 1
