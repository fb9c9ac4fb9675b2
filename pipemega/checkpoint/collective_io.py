"""Collective file operations: all ranks raise the same error, or none does.

An operation that runs on one rank, or that can fail on some ranks only, is followed by an exchange
of the errors. So no rank waits for a failed one, and a caller who catches the error can continue.
"""

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from pipemega.distributed.mesh import Axis, gather_objects
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import Storage

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


class CollectiveIO:
    """Runs file operations on all ranks, or on rank 0; every method is collective.

    Args:
        world: all ranks.
        storage: its root is named by errors that have no file name.
    """

    def __init__(self, world: Axis, storage: Storage) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._storage = world, storage

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: _T) -> list[_T]:
        """Return the (small) `value` of every rank, by rank."""
        return gather_objects(value, self._world)

    def gather_to_rank0(self, value: _T) -> list[_T]:
        """Return the `value` of every rank, by rank, on rank 0; [] on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_rank0 else None
        dist.gather_object(value, values, dst=self._world.ranks[0], group=self._world.group)
        return values or []

    def run_on_all(self, action: Callable[[], _T]) -> _T:
        """Run `action` on every rank, and return this rank's result.

        Raises:
            CheckpointError: `action` raised it, or an OSError, on a rank; the message is that of
                the first such rank.
        """
        value: _T | None = None
        cause: CheckpointError | OSError | None = None
        try:
            value = action()
        except (CheckpointError, OSError) as error:
            cause = error
        failures = self.all_gather(None if cause is None else self._message(cause))
        first = next((rank for rank, text in enumerate(failures) if text is not None), None)
        if first is not None:
            prefix = "" if len(set(failures)) == 1 else f"rank {first}: "
            raise CheckpointError(f"{prefix}{failures[first]}", on_every_rank=True) from cause
        return value  # type: ignore[return-value]  # None only if `action` returned it

    def run_on_rank0(self, action: Callable[[], _T]) -> _T:
        """Run `action` on rank 0 only, and return its (picklable) result on all ranks.

        Raises:
            CheckpointError: `action` raised it, or an OSError; of the same class, and without a
                rank number, because it is about files that all ranks share.
        """
        values: list[Any] = [None, None]
        cause: CheckpointError | OSError | None = None
        if self.is_rank0:
            try:
                values[0] = action()
            except (CheckpointError, OSError) as error:
                cause = error
                kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
                values[1] = kind, self._message(error)
        if self.size > 1:
            source, group = self._world.ranks[0], self._world.group
            dist.broadcast_object_list(values, src=source, group=group)
        result: _T = values[0]
        if values[1] is not None:
            kind, message = values[1]
            raise kind(message, on_every_rank=True) from cause
        return result

    def _message(self, error: CheckpointError | OSError) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        text = f"{error.strerror or error} ({error.filename or self._storage.full_path()})"
        if error.errno in _DISK_FULL:
            with suppress(OSError):
                free = self._storage.free_bytes()
                left = "" if free is None else f"{free / 1e6:.0f} MB are free there: "
                text += f", {left}free some space, or keep fewer checkpoints (checkpoint.keep_last)"
        return text
