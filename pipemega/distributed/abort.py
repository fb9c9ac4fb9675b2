"""Abort the communicators of this process, so that no kernel waits for a lost rank."""

import threading
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from pipemega.distributed.backends import backends_except_gloo

# Longest time for an abort. One that is stuck may last for the timeout of its group; the process
# then ends without it.
ABORT_SECONDS = 3.0

_one_at_a_time = threading.Lock()


def abort_communicators() -> bool:
    """Abort all communicators, except those of gloo.

    All at once: communicators that are aborted one after another may wait for each other. In a
    thread that nothing waits for afterwards.

    Returns:
        whether that is complete within a few seconds.
    """
    backends = _backends()
    if not backends:
        return True
    thread = threading.Thread(target=_abort, args=(backends,), daemon=True, name="abort")
    thread.start()
    thread.join(ABORT_SECONDS)
    return not thread.is_alive()


def _backends() -> list[Any]:
    groups = list(dist.distributed_c10d._world.pg_map)
    return [backend for group in groups for backend in backends_except_gloo(group)]


def _abort(backends: list[Any]) -> None:
    if not _one_at_a_time.acquire(blocking=False):
        return
    try:
        # As torch's _abort_process_group(), which also forgets the groups and their store: the
        # report of the error still needs them.
        grouped = hasattr(backends[0], "_group_start")
        if grouped:
            backends[0]._group_start()
        for backend in backends:
            with suppress(RuntimeError):
                backend.abort()
        if grouped:
            backends[0]._group_end()
    finally:
        _one_at_a_time.release()
