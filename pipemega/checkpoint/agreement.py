"""All ranks raise the same error, or none does.

What one rank does alone, and what may fail on one rank only, is agreed on afterwards. So nobody is
left waiting, and a caller who catches the error may go on.
"""

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from pipemega.checkpoint.disk import Disk
from pipemega.errors import CheckpointError
from pipemega.mesh import Axis

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


class Agreement:
    """What the ranks of `world` do together on a disk; every method is collective.

    Args:
        world: all ranks.
        disk: what errors that name no file are about.
    """

    def __init__(self, world: Axis, disk: Disk) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._disk = world, disk

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """`value` of every rank, by rank; for small ones."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._world.group)
        return values

    def to_first(self, value: _T) -> list[_T]:
        """`value` of every rank, by rank, on rank 0; elsewhere nothing."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=self._world.ranks[0], group=self._world.group)
        return values or []

    def together(self, action: Callable[[], _T]) -> _T:
        """Runs `action` on this rank, and returns what it gave here.

        Raises:
            CheckpointError: with the cause of the first rank on which it raised that or an OSError.
        """
        value: _T | None = None
        cause: CheckpointError | OSError | None = None
        try:
            value = action()
        except (CheckpointError, OSError) as error:
            cause = error
        failures = self.gather(None if cause is None else self._said(cause))
        first = next((rank for rank, text in enumerate(failures) if text is not None), None)
        if first is not None:
            who = "" if len(set(failures)) == 1 else f"rank {first}: "
            raise CheckpointError(f"{who}{failures[first]}", on_every_rank=True) from cause
        return value  # type: ignore[return-value]  # None only if the action gave that

    def from_first(self, action: Callable[[], _T]) -> _T:
        """Runs `action` on rank 0 only, and returns what it gave there; raises like `together`.

        Its error bears no rank: it is about what all of them share.
        """
        values: list[Any] = [None, None]
        cause: CheckpointError | OSError | None = None
        if self.is_first:
            try:
                values[0] = action()
            except (CheckpointError, OSError) as error:
                cause, values[1] = error, self._said(error)
        if self.size > 1:
            dist.broadcast_object_list(values, src=self._world.ranks[0], group=self._world.group)
        made: _T = values[0]
        if values[1] is not None:
            raise CheckpointError(values[1], on_every_rank=True) from cause
        return made

    def _said(self, error: CheckpointError | OSError) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        text = f"{error.strerror or error} ({error.filename or self._disk.where()})"
        if error.errno in _DISK_FULL:
            with suppress(OSError):
                free = self._disk.free()
                left = "" if free is None else f"{free / 1e6:.0f} MB are left there: "
                text += f", {left}make room, or keep fewer checkpoints (checkpoint.keep_last)"
        return text


def essence(error: BaseException) -> str:
    """The sentence of torch's long texts that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
    return telling.split(". ")[0] or type(error).__name__
