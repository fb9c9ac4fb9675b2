"""One rank fails, all ranks end, and every one of them says why.

A failing rank writes its cause where all can read it (the store that the ranks met through), then
breaks its connections. Whoever waits for it is woken by that, reads the cause, and does the same:
the news spreads along whatever anybody waits for. A rank that is killed breaks its connections
without a word, and its neighbours say so.
"""

import contextlib
import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipemega.errors import PeerError, PipelineError, PipemegaError
from pipemega.mesh import Axis, Mesh

_KEY = "pipemega/first_failure"

# What the backends write when the other side has left, or did not answer in time.
_SIGNS_OF_LOSS = (
    "connection closed", "connection reset", "pair closure", "timed out", "broken pipe",
    "connection refused", "remote process exited", "nccl", "socket",
)  # fmt: skip

# How long a rank with a broken connection waits for the cause to be written.
_PATIENCE = 3.0


class FailureBoard:
    """Where the first cause is written and read.

    Args:
        mesh: the mesh of this rank; a mesh of one rank needs no board.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._store: Any = None
        if mesh.world.size > 1:
            self._store = dist.distributed_c10d._get_default_store()

    def explain(self, error: Exception) -> Exception:
        """What this rank should raise for `error`: itself, or another rank's cause behind it.

        Tells the other ranks, and breaks the connections that they may be waiting on.
        """
        if self._store is None or isinstance(error, PeerError):
            return error
        cause = self._read(_PATIENCE if _is_loss(error) else 0.0)
        if cause is None:
            cause = self._write(error)
        self._leave()
        if cause["rank"] == self._mesh.rank:
            return error
        return PeerError(
            f"rank {cause['rank']} failed first: {cause['message']}\n"
            f"  (rank {self._mesh.rank} was stopped by that: {_first_line(error)})"
        )

    def _read(self, patience: float) -> dict[str, object] | None:
        assert self._store is not None
        deadline = time.monotonic() + patience
        while True:
            # The store lives in one of the processes, which may be the one that is gone.
            with contextlib.suppress(RuntimeError):
                if self._store.check([_KEY]):
                    return dict(json.loads(self._store.get(_KEY)))
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def _write(self, error: Exception) -> dict[str, object]:
        """Writes this rank's cause unless there is one; returns the one that stands."""
        assert self._store is not None
        mine = {"rank": self._mesh.rank, "message": self._message(error)}
        with contextlib.suppress(RuntimeError):
            standing = self._store.compare_set(_KEY, "", json.dumps(mine))
            return dict(json.loads(standing))
        return mine

    def _message(self, error: Exception) -> str:
        text = (
            str(error) if isinstance(error, PipemegaError) else f"{type(error).__name__}: {error}"
        )
        if isinstance(error, PipelineError) and _is_loss(error):
            text += " (it was killed, it crashed, or it hangs)"
        return text

    def _leave(self) -> None:
        """Breaks every connection of this rank, so that nobody waits for it."""
        groups = {id(a.group): a.group for a in self._axes if a.group is not None}
        for group in groups.values():
            if dist.get_backend(group) == "gloo":
                _break_gloo(group)
            else:
                with contextlib.suppress(RuntimeError):
                    group._get_backend(self._mesh.device).abort()

    @property
    def _axes(self) -> tuple[Axis, ...]:
        mesh = self._mesh
        return (mesh.pipeline, mesh.data, mesh.tensor, mesh.world)


def _break_gloo(group: dist.ProcessGroup) -> None:
    """Gloo closes all connections of a group when one wait in it runs out of time; so let one."""
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    with contextlib.suppress(RuntimeError):
        work = dist.irecv(torch.empty(1), others[0], group=group, tag=0x7FFF)
        assert work is not None
        work.wait(timedelta(milliseconds=1))


def _is_loss(error: BaseException) -> bool:
    """Whether the error, or one that it came from, is a broken or silent connection."""
    seen: BaseException | None = error
    while seen is not None:
        if any(sign in str(seen).lower() for sign in _SIGNS_OF_LOSS):
            return True
        seen = seen.__cause__
    return False


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
