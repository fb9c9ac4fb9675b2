"""Saving while training goes on.

What a rank has to write is copied, which is all that a step waits for; a thread writes the copies.
It talks to the threads of the other ranks over a group of its own, so that nothing of theirs comes
between the messages of a step.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.checkpoint.pieces import Outgoing
from pipemega.endings import are_collected
from pipemega.errors import CheckpointError
from pipemega.mesh import Axis

_log = logging.getLogger(__name__)


class Staging:
    """Copies on the CPU of what is to be written, in memory that is kept for the next time.

    Args:
        device: where the tensors are; copies from a GPU go into pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.Size], Tensor] = {}

    @torch.no_grad()
    def copy(self, pieces: Mapping[str, Outgoing]) -> dict[str, Outgoing]:
        """The same pieces as they are now; good until the next call."""
        before, self._kept = self._kept, {}
        copies = {}
        for name, piece in pieces.items():
            chunks = {}
            for offsets, (chunk, part) in piece.chunks.items():
                room = before.get((name, offsets))
                if room is None or room.shape != part.shape or room.dtype != part.dtype:
                    room = self._room_for(part)
                room.copy_(part, non_blocking=True)
                self._kept[name, offsets] = room
                chunks[offsets] = (chunk, room)
            copies[name] = Outgoing(piece.shape, chunks)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def _room_for(self, part: Tensor) -> Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pinned)


class Background:
    """One thing at a time that is done beside the training, on all ranks.

    Args:
        world: all ranks.
        timeout: how long its ranks wait for each other.
    """

    def __init__(self, world: Axis, timeout: timedelta) -> None:
        self._world, self._timeout = world, timeout
        self._axis: Axis | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, action: Callable[[Axis], object]) -> None:
        """Begins `action`, which gets the ranks in a group that nobody else talks over.

        What was begun before must have been waited for.
        """
        assert self._thread is None, "one at a time"
        axis = self.meet()

        def run() -> None:
            try:
                action(axis)
            # Who waits for it gets it too; but a script may end before anybody does.
            except BaseException as error:
                self._error = error
                if axis.rank == 0 or not isinstance(error, CheckpointError):
                    _log.error("%s", error)

        # A disk that hangs must not keep the process from its end for ever.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        if not are_collected():
            # Otherwise `pipemega.run` waits at the end of a script, and not after an error, when
            # other ranks no longer write their part.
            atexit.register(self._thread.join, self._timeout.total_seconds())
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Returns when it is done, with the error that it ended in; at once if there is none.

        Raises:
            CheckpointError: it is not done for as long as ranks wait for each other.
        """
        if self._thread is not None:
            seconds = self._timeout.total_seconds()
            self._thread.join(seconds)
            atexit.unregister(self._thread.join)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint that is written in the background is not done after another "
                    f"{seconds:g} s (mesh.timeout_seconds): the disk hangs or is too slow"
                )
        self._thread = None
        error, self._error = self._error, None
        return error

    def meet(self) -> Axis:
        """The ranks in their own group; collective, the first time.

        While a group is made nobody can hear that a rank has died: so it is best made at the start.
        """
        if self._axis is None:
            group = None
            if self._world.size > 1:
                # gloo: the files are written by the CPU, and NCCL's are busy.
                group = dist.new_group(
                    list(self._world.ranks), self._timeout, "gloo", group_desc="checkpoint"
                )
            self._axis = Axis("checkpoint", self._world.ranks, self._world.rank, group)
        return self._axis
