"""Saving in the background: copy the tensors, then write the copies in a thread.

    compute stream   save |  forwards, backwards of the next step   | waits for the copies, update
    side stream           |  copies to pinned memory  |
    thread                   waits for the copies     |  writes the files ..

Without a CUDA device the copies are complete when the save returns. The threads of the ranks use
their own process group, so their collectives cannot mix with the collectives of a step.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.checkpoint.tensors import OutgoingShard
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.host_memory import CopyEvent, HostMemory
from pipemega.distributed.mesh import Axis
from pipemega.distributed.process_groups import device_thread
from pipemega.distributed.topology import exit_hooks_enabled
from pipemega.errors import CheckpointError

_log = logging.getLogger(__name__)

# Space for the gaps between the views: a factor, and bytes.
_ROOM, _LEAST_ROOM = 1.01, 1 << 20

# Name and offsets of a chunk.
_ChunkKey = tuple[str, torch.Size]


@dataclass(frozen=True)
class StagedShards:
    """Copies of shards in host memory, complete when `copied` has occurred.

    Until then the copied tensors must not change.
    """

    shards: dict[str, OutgoingShard]
    copied: CopyEvent


class Staging:
    """Copies the shards to write to one buffer in host memory, beside the work of a CUDA device.

    The buffer is allocated at the first save, or before by `reserve`, and again only if shards of
    other shapes do not fit.

    Args:
        memory: host memory for copies from the device of the tensors.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._views: dict[_ChunkKey, Tensor] = {}
        self._reserved: Tensor | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate the buffer for shards of about this size, if the memory is pinned.

        Pinning takes long and makes the device wait; and if it fails, the run ends at its start.

        Raises:
            PipemegaError: the memory cannot be pinned.
        """
        if self._memory.pins:
            size = int(nbytes * _ROOM) + _LEAST_ROOM
            self._reserved = self._memory.empty(size, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, shards: Mapping[str, OutgoingShard]) -> StagedShards:
        """Start copies of the shards; they are valid until the next call."""
        views = self._views_for(shards)
        changed_by_step: list[tuple[Tensor, Tensor]] = []
        copies = {}
        for name, shard in shards.items():
            chunks = {}
            for offsets, part in shard.chunks.items():
                view = chunks[offsets] = views[name, offsets]
                if name.startswith("buffers/") or self._memory.holds(part):
                    # On the current stream: forwards change buffers. On the host: now.
                    self._memory.copy(view, part)
                else:
                    changed_by_step.append((view, part))
            copies[name] = OutgoingShard(shard.shape, chunks)
        with self._memory.side_stream():
            for view, part in changed_by_step:
                self._memory.copy(view, part)
            copied = self._memory.record()
        return StagedShards(copies, copied)

    def _views_for(self, shards: Mapping[str, OutgoingShard]) -> dict[_ChunkKey, Tensor]:
        """Return the host memory of each chunk."""
        parts = {
            (name, offsets): part
            for name, shard in shards.items()
            for offsets, part in shard.chunks.items()
        }
        specs = {key: (part.shape, part.dtype) for key, part in parts.items()}
        if specs != {key: (view.shape, view.dtype) for key, view in self._views.items()}:
            # Freed before the new buffer is allocated.
            self._views = {}
            views = self._memory.empty_views(list(specs.values()), within=self._reserved)
            self._views = dict(zip(specs, views, strict=True))
        return self._views


class BackgroundTask:
    """Runs one action at a time in a thread on every rank, beside the training.

    Args:
        world: the axis of all ranks.
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
        self._thread = device_thread(run, "checkpoint")
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
                what = f"rank {self._world.rank} in the creation of process group 'checkpoint'"
                with named_collective(what, self._world.ranks):
                    group = dist.new_group(
                        list(self._world.ranks), self._timeout, "gloo", group_desc="checkpoint"
                    )
            self._axis = Axis("checkpoint", self._world.ranks, self._world.rank, group)
        return self._axis
