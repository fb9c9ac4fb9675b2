"""Saving in the background: copy the tensors, then write the copies in a thread.

A training step waits only for the copies. The threads of the ranks use their own process group,
so their collectives cannot mix with those of a step.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.checkpoint.shards import OutgoingShard
from pipemega.distributed.exit_hooks import exit_hooks_enabled
from pipemega.distributed.mesh import Axis
from pipemega.errors import CheckpointError

_log = logging.getLogger(__name__)


class Staging:
    """CPU copies of the shards to write; the buffers are reused by the next save.

    Args:
        device: the device of the tensors; copies from a GPU use pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.Size], Tensor] = {}

    @torch.no_grad()
    def copy(self, shards: Mapping[str, OutgoingShard]) -> dict[str, OutgoingShard]:
        """Return copies of the shards; valid until the next call."""
        previous, self._buffers = self._buffers, {}
        copies, pin = {}, self._device.type == "cuda"
        for name, shard in shards.items():
            chunks = {}
            for offsets, (chunk, part) in shard.chunks.items():
                buffer = previous.get((name, offsets))
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pin)
                buffer.copy_(part, non_blocking=True)
                self._buffers[name, offsets] = buffer
                chunks[offsets] = (chunk, buffer)
            copies[name] = OutgoingShard(shard.shape, chunks)
        if pin:
            torch.cuda.synchronize(self._device)
        return copies


class BackgroundTask:
    """Runs one action at a time in a thread on every rank, beside the training.

    Args:
        world: all ranks.
        timeout: how long the ranks wait for each other.
    """

    def __init__(self, world: Axis, timeout: timedelta) -> None:
        self._world, self._timeout = world, timeout
        self._axis: Axis | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, action: Callable[[Axis], object]) -> None:
        """Start `action` with all ranks as an axis that has its own process group.

        Call `wait` before the next `start`.
        """
        assert self._thread is None, "one at a time"
        axis = self.connect()

        def run() -> None:
            try:
                action(axis)
            # `wait` returns it too; but a script may end before it calls `wait`.
            except BaseException as error:
                self._error = error
                if axis.rank == 0 or not isinstance(error, CheckpointError):
                    _log.error("%s", error)

        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        if not exit_hooks_enabled():
            # With exit hooks `pipemega.run` waits at the end of a script, and not after an error,
            # when other ranks may no longer write their part.
            atexit.register(self._thread.join, self._timeout.total_seconds())
        self._thread.start()

    def wait(self) -> CheckpointError | None:
        """Wait until the action ends; return the CheckpointError that it raised, or None.

        Raises:
            CheckpointError: it did not end within the timeout.
            BaseException: any other error of the action.
        """
        if self._thread is not None:
            seconds = self._timeout.total_seconds()
            self._thread.join(seconds)
            atexit.unregister(self._thread.join)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the background save did not finish within another {seconds:g} s "
                    f"(mesh.timeout_seconds): the disk hangs or is too slow"
                )
        self._thread = None
        error, self._error = self._error, None
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error

    def connect(self) -> Axis:
        """Return all ranks with their own process group; collective in the first call.

        While a group is created, a rank cannot notice that another one has died. So create it
        early.
        """
        if self._axis is None:
            group = None
            if self._world.size > 1:
                # gloo: the CPU writes the files, and NCCL's queues belong to the step.
                group = dist.new_group(
                    list(self._world.ranks), self._timeout, "gloo", group_desc="checkpoint"
                )
            self._axis = Axis("checkpoint", self._world.ranks, self._world.rank, group)
        return self._axis
