"""Batch reader: inputs on the ranks of the first stage, labels on the ranks of the last stage.

Compares what the ranks have read: all pipeline and tensor ranks of a data rank read the same.

A whole batch (inputs, labels) of a data rank: its samples, and its micro-batches.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.config.batch import RAMPUP, TRAIN, BatchSizes
from pipemega.data.loader import BatchLoader, LoadedStep
from pipemega.data.sample_reader import Share
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import ConfigError, DataError
from pipemega.pipeline.messages import map_tensors, tensors_of
from pipemega.tensor_parallel.linear_cross_entropy import count_labels

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
            num_microbatches: how many micro-batches the call reads; equal on all ranks.
            must_differ: equal data on two data ranks is an error too.
            inputs_may_differ: the inputs of this rank may differ between stages, because only the
                first stage uses them.

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


def count_samples(batch: Any) -> int | None:
    """Return the samples along dim 0 of the tensors of a batch; None if it has no tensor.

    Raises:
        ConfigError: it is not a pair, a tensor has no dim 0, or two have different lengths.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        members = f" of {len(batch)} members" if isinstance(batch, tuple | list) else ""
        raise ConfigError(
            f"batch is a {type(batch).__name__}{members}, and must be a pair (inputs, labels); "
            "each of them may be any pytree of tensors"
        )
    first: tuple[str, int] | None = None
    tensors_of(batch)  # makes the fields of a dataclass visible
    leaves = [
        (part + pytree.keystr(path), leaf)
        for part, tree in zip(("inputs", "labels"), batch, strict=True)
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]
    ]
    for name, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            raise ConfigError(f"batch: {name} is a numpy array: pass torch.from_numpy({name})")
        if not isinstance(leaf, Tensor):
            continue
        if leaf.dim() == 0:
            raise ConfigError(
                f"batch: {name} is a tensor without dims, and a batch is cut along dim 0 of its "
                "tensors: give it a dim 0 with one entry per sample, or pass a number"
            )
        if first is None:
            first = name, len(leaf)
        elif len(leaf) != first[1]:
            raise ConfigError(
                f"batch: {first[0]} has {first[1]} samples along dim 0, and {name} has "
                f"{len(leaf)}: all tensors of a batch need the same number"
            )
    return None if first is None else first[1]


def split_batch(batch: Any, num_samples: int, size: int) -> list[tuple[Any, Any]]:
    """Cut the tensors of a batch into micro-batches of `size` along dim 0; the last may be smaller.

    Other values, such as numbers, are in every micro-batch.
    """

    def part(start: int) -> tuple[Any, Any]:
        def cut(tensor: Tensor) -> Tensor:
            return tensor[start : start + size]

        inputs, labels = map_tensors(cut, list(batch))
        return inputs, labels

    return [part(start) for start in range(0, num_samples, size)]


# Larger than any number that ranks agree on: the ranks that know none contribute it.
_UNKNOWN = 2**62


@dataclass(frozen=True)
class StepData:
    """The data of a step on one rank.

    Args:
        inputs, labels: one entry per micro-batch; None or empty if the stages do not read them.
        num_samples: number of samples of the step, on all data ranks.
        shares: samples of each micro-batch, relative to a full one; None: all are full.
        epoch: completed passes over the data after the step; None: not known.
        counted: see `MicroBatches`.
        pairs: the micro-batches as this rank has read them; None: it reads none.
    """

    inputs: list[Any]
    labels: list[Any]
    num_samples: int
    shares: tuple[float, ...] | None = None
    epoch: int | None = None
    counted: tuple[int | None, ...] = ()
    pairs: Sequence[Any] | None = None

    def with_samples(self) -> "StepData":
        """Return the step without the micro-batches that only complete it."""
        if self.shares is None:
            return self
        count = sum(share > 0 for share in self.shares)
        return replace(
            self,
            inputs=self.inputs[:count],
            labels=self.labels[:count],
            shares=self.shares[:count],
            epoch=None,
            counted=self.counted[:count],
        )


class BatchReader:
    """Reads micro-batches for the stages of one rank, from the caller's iterators or a loader.

    Args:
        mesh: its ranks agree on the number of micro-batches that are left.
        reads: whether the stages of this rank need the inputs, and the labels.
        share: the number of samples and micro-batches of a training step after a ramp-up.
        sizes: the number of samples of each training step.
        compare_every: how often to compare what the ranks have read; config key
            data.compare_every.
        signal: is called whenever the ranks agree on something.
        is_fenced: whether the ranks agree before each training step, also if the data do not need
            it; post-validation exists so that they do not wait for each other.

    Attributes:
        signalled: whether `signal` returned True on some rank, the last time.
    """

    def __init__(
        self,
        mesh: Mesh,
        reads: tuple[bool, bool],
        share: Share,
        sizes: BatchSizes,
        compare_every: int,
        signal: Callable[[], bool] = lambda: False,
        is_fenced: bool = True,
    ) -> None:
        self._mesh, self._share = mesh, share
        self._sizes, self._ramp = sizes, replace(share, ramp=sizes)
        self._memory = HostMemory(mesh.device)
        self._training_data = DataComparison(mesh, compare_every, "train_batch")
        self._evaluation_data = DataComparison(mesh, compare_every, "eval_batch")
        self._signal, self.signalled, self._is_fenced = signal, False, is_fenced
        self._reads_inputs, self._reads_labels = reads
        self._reads = any(reads)

    def next_step(
        self,
        loader: BatchLoader | None,
        data_iter: Iterator[Any] | None,
        batch: Any,
        position: int,
    ) -> StepData:
        """Return the next training step: `batch`, or from `data_iter`, or from `loader`.

        Args:
            position: samples before the step, on which its size depends.

        Raises:
            StopIteration, DataError: as `next_evaluation`.
            ConfigError: none of them exists, `data_iter` is not an iterator, or `batch` has another
                number of samples.
        """
        share = self._ramp.at(position)
        count, samples = share.num_microbatches, share.train_batch_size
        if batch is not None:
            needed = samples // self._share.data_size
            found = self._count(batch, needed, grows=self._sizes.changes)
            step = self._from_batch(batch, found or needed, count, self._training_data)
            return replace(step, num_samples=samples)
        if data_iter is not None:
            _refuse_restarting(data_iter)
        elif loader is not None:
            if loader.is_map_style and self._is_fenced:
                self._min_over_ranks()
            return self._from_loader(loader, count, self._training_data)
        elif self._reads:
            raise ConfigError(
                "train_batch() has no data: give initialize() training_data, or call "
                "train_batch(iterator over (inputs, labels)) or train_batch(batch=(inputs, labels))"
            )
        # Without an iterator this rank only joins the collectives of those that read one.
        given = iter(()) if data_iter is None else data_iter
        return self._from_iterator(given, count, self._training_data)

    def next_evaluation(self, data_iter: Iterator[Any], count: int) -> StepData:
        """Return the next `count` micro-batches; collective.

        Raises:
            StopIteration: no micro-batch is left; on every rank.
            DataError: fewer than `count` are left, or the ranks of a data rank have read different
                data; on every rank. Or one is not a pair.
        """
        return self._from_iterator(data_iter, count, self._evaluation_data)

    def evaluation_step(self, loader: BatchLoader) -> StepData:
        """Return the next global batch of `loader`; its last one may be partial. Collective.

        Raises:
            StopIteration: the data has ended; on every rank.
        """
        count = self._share.num_microbatches
        return self._from_loader(loader, count, self._evaluation_data).with_samples()

    def evaluation_batch(self, batch: Any) -> StepData:
        """Return the micro-batches of a batch, of any number of samples; collective.

        Raises:
            ConfigError: the batch cannot be cut, or the ranks of a data rank have batches of
                different sizes; on every rank.
        """
        own = self._count(batch, None)
        rank, size = self._mesh.data.rank, self._mesh.data.size
        numbers = [_UNKNOWN] * (2 * size)
        if own is not None:
            numbers[2 * rank : 2 * rank + 2] = own, -own
        numbers = self._min_over_ranks(*numbers)
        pairs = [(numbers[2 * d], -numbers[2 * d + 1]) for d in range(size)]
        for data_rank, (smallest, largest) in enumerate(pairs):
            if smallest != largest:
                found = "no tensor" if smallest == _UNKNOWN else f"{smallest} and {largest} samples"
                raise ConfigError(
                    f"eval_batch(batch=...): the ranks of data rank {data_rank} have batches of "
                    f"{found}: all pipeline and tensor ranks of a data rank must pass the same "
                    "batch",
                    on_every_rank=True,
                )
        most = max(samples for samples, _ in pairs)
        if most == 0:
            raise ConfigError(
                "eval_batch(batch=...): the batch has 0 samples along dim 0, on all data ranks",
                on_every_rank=True,
            )
        count = -(-most // self._share.micro_batch_size)
        return self._from_batch(batch, pairs[rank][0], count, self._evaluation_data)

    # Whole batches

    def _count(self, batch: Any, needed: int | None, *, grows: bool = False) -> int | None:
        """Return the samples of a batch of this rank; None: it has no tensor. Collective.

        Raises:
            ConfigError: it cannot be cut, or has not as many as `needed`; on every rank.
        """
        problem, found = "", needed
        try:
            found = count_samples(batch)
            if needed is not None and found not in (None, needed):
                problem = self._other_size(found or 0, needed, grows=grows)
        except ConfigError as error:
            problem = str(error)
        if self._min_over_ranks(-1 if problem else self._share.num_microbatches)[0] < 0:
            raise self._batch_error(problem)
        return found

    def _other_size(self, found: int, needed: int, *, grows: bool) -> str:
        ranks = self._share.data_size
        whole = "the samples of this step" if grows else TRAIN
        other = (
            f"{RAMPUP} determines the samples of a step from engine.consumed_samples"
            if grows
            else f"or set {TRAIN} to {found * ranks}; drop a smaller last batch, or give "
            "initialize() the data and set training.epochs"
        )
        return (
            f"batch has {found} samples along dim 0, and needs {whole} / mesh.data "
            f"({needed * ranks} / {ranks} = {needed}), the samples of one data rank: give it "
            f"{needed}{'; ' if grows else ', '}{other}"
        )

    def _batch_error(self, problem: str) -> ConfigError:
        """Return the first problem of all ranks with their batches; collective."""
        problems = gather_objects(problem, self._mesh.world)
        return ConfigError(next(filter(None, problems)), on_every_rank=True)

    def _from_batch(
        self, batch: Any, num_samples: int, most: int, comparison: DataComparison
    ) -> StepData:
        """Cut a batch of `num_samples`; `most`: the micro-batches of the largest one."""
        size = self._share.micro_batch_size
        pairs = split_batch(batch, num_samples, size)
        comparison.check(pairs if self._reads else None, most)
        sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
        read = pairs if self._reads else None
        return self._step_data(read, len(pairs), num_samples, self._shares(sizes))

    # Loaders

    def _from_loader(self, loader: BatchLoader, count: int, comparison: DataComparison) -> StepData:
        if not loader.is_map_style and not loader.by_epoch:
            return self._from_iterator(loader, count, comparison)
        if loader.is_map_style:
            # Every rank knows the length of the data: no agreement needed.
            step = loader.read_step() if self._reads else loader.skip_step()
        else:
            step = self._agreed_step(loader, count)
        if loader.is_compared:
            comparison.check(step.micro_batches, count, must_differ=loader.must_differ)
        shares = self._shares(step.sizes)
        return self._step_data(step.micro_batches, count, step.num_samples, shares, step.epoch)

    def _agreed_step(self, loader: BatchLoader, count: int) -> LoadedStep:
        """Read a step of data whose length is not known; the ranks that do not read it learn its
        size and whether the epoch has ended. Collective.

        Raises:
            StopIteration: the data has ended; on every rank.
            DataError: the data or an epoch of it ends on some data ranks only; on every rank.
        """
        step: LoadedStep | None = None
        data = self._mesh.data
        had, epoch, samples = count, (_UNKNOWN, _UNKNOWN), [_UNKNOWN] * data.size
        if self._reads:
            try:
                step = loader.read_step()
                epoch, samples[data.rank] = (step.epoch, -step.epoch), sum(step.sizes)
            except StopIteration:
                had = 0
        fewest, first, last, *samples = self._min_over_ranks(had, *epoch, *samples)
        if fewest < count:
            raise self._ended(fewest, had, count)
        if first != -last:
            raise DataError(
                f"epoch {first} of {loader.name} ends with this step on some data ranks, and not "
                "on others: all data ranks need the same number of micro-batches per epoch "
                "(torch's DistributedSampler gives all ranks equally many samples)",
                on_every_rank=True,
            )
        # Only the last micro-batch with samples may be smaller.
        size = self._share.micro_batch_size
        sizes = [min(max(samples[data.rank] - j * size, 0), size) for j in range(count)]
        return LoadedStep(step.micro_batches if step else None, sizes, sum(samples), first)

    def _shares(self, sizes: Sequence[int]) -> tuple[float, ...] | None:
        full = self._share.micro_batch_size
        if all(size == full for size in sizes):
            return None
        return tuple(size / full for size in sizes)

    # Iterators

    def _from_iterator(
        self, data_iter: Iterator[Any], count: int, comparison: DataComparison
    ) -> StepData:
        pairs = list(itertools.islice(data_iter, count)) if self._reads else None
        had = count if pairs is None else len(pairs)
        (fewest,) = self._min_over_ranks(had)
        if fewest < 0:
            # Another rank has passed a batch, and cannot cut it.
            raise self._batch_error("")
        if fewest < count:
            raise self._ended(fewest, had, count)
        _check_pairs(pairs or ())
        if not isinstance(data_iter, BatchLoader):
            may_differ = getattr(data_iter, "inputs_may_differ", False)
            comparison.check(pairs, count, inputs_may_differ=may_differ)
        elif data_iter.is_compared:
            comparison.check(pairs, count, must_differ=data_iter.must_differ)
        return self._step_data(pairs, count, count * self._share.samples_per_slice)

    def _ended(self, fewest: int, had: int, count: int) -> Exception:
        """Return the error of data that has ended; collective.

        Args:
            fewest: micro-batches that were left on a rank.
            had: micro-batches that were left on this rank.
        """
        if fewest == 0 and self._min_over_ranks(-had if self._reads else 0) == [0]:
            return StopIteration(
                "the iterator has no micro-batch left: end the loop there (catch StopIteration), "
                "or make the data repeat, for example by giving initialize() the dataset"
            )
        return DataError(
            f"the data ended within a batch: {count} micro-batches are needed, and the iterator of "
            f"a data rank had {fewest} left (this rank: {had}); give a multiple of {count}, "
            f"or drop the rest",
            on_every_rank=True,
        )

    def _min_over_ranks(self, *numbers: int) -> list[int]:
        """Return the minimum of each number over all ranks; collective."""
        self.signalled = self._signal()
        if self._mesh.world.size == 1:
            return [*numbers]
        # In host memory: a number of the device could be read only after all work before it.
        tensor = torch.tensor([*numbers, not self.signalled], dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._mesh.world.group)
        *smallest, unchanged = tensor.tolist()
        self.signalled = not unchanged
        return smallest

    def _step_data(
        self,
        pairs: Sequence[Any] | None,
        count: int,
        num_samples: int,
        shares: tuple[float, ...] | None = None,
        epoch: int | None = None,
    ) -> StepData:
        """Return what the stages of this rank read of `pairs`, on its device."""
        inputs: list[Any] = [None] * count
        labels, counted = list[Any](), tuple[int | None, ...]()
        if pairs is not None and self._reads_inputs:
            inputs = self.to_device([pair[0] for pair in pairs])
        if pairs is not None and self._reads_labels:
            labels = self.to_device([pair[1] for pair in pairs])
            if self._mesh.device.type != "cpu":
                counted = tuple(count_labels(pair[1]) for pair in pairs)
        return StepData(inputs, labels, num_samples, shares, epoch, counted, pairs)

    def for_these_stages(self, data: StepData) -> StepData:
        """Return a training step that a reader for other stages has read."""
        return self._step_data(
            data.pairs, len(data.inputs), data.num_samples, data.shares, data.epoch
        )

    def to_device(self, tree: Any) -> Any:
        """Copy the tensors of a pytree to the device of this rank, from pinned memory.

        A loader pins its data in its thread; the data of a caller's iterator are pinned here.
        """

        def copied(tensor: Tensor) -> Tensor:
            return self._memory.pinned(tensor).to(self._mesh.device, non_blocking=True)

        return map_tensors(copied, tree)


def _refuse_restarting(data_iter: Any) -> None:
    """Refuse a DataLoader or list: each step would read its first micro-batches."""
    if not hasattr(data_iter, "__next__"):
        raise ConfigError(
            f"train_batch() takes an iterator, and {type(data_iter).__name__} starts again at each "
            "call: make iterator = iter(...) once, before the first step, or give it to "
            "initialize() as training_data"
        )


def _check_pairs(batches: Sequence[Any]) -> None:
    """Check micro-batches of a caller's iterator; a loader checks its own."""
    for index, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"micro-batch {index} is a {type(batch).__name__}, and must be a pair "
                f"(inputs, labels); each of them may be any pytree of tensors"
            )
