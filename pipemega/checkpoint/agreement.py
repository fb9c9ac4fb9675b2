"""All ranks raise the same error, or none does.

What one rank does alone, and what may fail on one rank only, is agreed on afterwards. So nobody is
left waiting, and a caller who catches the error may go on.
"""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pipemega.errors import CheckpointError
from pipemega.mesh import Axis

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


class Agreement:
    """What the ranks of `world` do together in a folder; every method is collective.

    Args:
        world: all ranks.
        folder: what errors that name no file are about.
    """

    def __init__(self, world: Axis, folder: Path) -> None:
        self._world, self._folder = world, folder

    @property
    def is_first(self) -> bool:
        return self._world.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """`value` of every rank, by rank."""
        if self._world.size == 1:
            return [value]
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._world.group)
        return values

    def together(self, action: Callable[[], _T]) -> _T:
        """Runs `action` on this rank, and returns what it gave here.

        Raises:
            CheckpointError: with the cause of the first rank on which it raised that or an OSError.
        """
        value: _T | None = None
        cause: Exception | None = None
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
        """Runs `action` on rank 0 only, and returns what it gave there; raises like `together`."""
        value = self.together(lambda: action() if self.is_first else None)
        return self.gather(value)[0]  # type: ignore[return-value]  # rank 0 did run it

    @contextmanager
    def on_torch_errors(self) -> Iterator[None]:
        """Turns what torch.distributed.checkpoint raises, on all ranks alike, into one sentence."""
        try:
            yield
        except CheckpointException as error:
            own, _ = error.failures.get(self._world.rank, (None, None))
            if own is not None and not isinstance(own, Exception):
                # Ctrl-C or a signal: to be obeyed by who got it.
                raise own from None
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            who = "" if self._world.size == 1 else f"rank {rank}: "
            raise CheckpointError(f"{who}{self._said(cause)}", on_every_rank=True) from cause

    def _said(self, error: BaseException) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        if not isinstance(error, OSError):
            return f"{type(error).__name__}: {essence(error)}"
        text = f"{error.strerror or error} ({error.filename or self._folder})"
        if error.errno in _DISK_FULL:
            free = 0
            with suppress(OSError):
                free = shutil.disk_usage(self._folder).free
            text += (
                f", {free / 1e6:.0f} MB are left there: make room, or keep fewer checkpoints "
                f"(checkpoint.keep_last)"
            )
        return text


def essence(error: BaseException) -> str:
    """The sentence of torch's long texts that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
    return telling.split(". ")[0] or type(error).__name__
