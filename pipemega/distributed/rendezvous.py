"""Agree on a name for this incarnation of a run, so that ranks never read stale store keys.

torchrun restarts all ranks when one has failed (--max-restarts), and usually keeps the store. The
restarted ranks would read keys of the earlier ones, such as addresses and failure reports. The
restart count does not identify an incarnation: with several nodes, each torchrun has its own count.
So rank 0 creates a name, and every rank checks that the name it has read is that of the current
incarnation:

    rank 0                                  rank r
    write a new name
                                            read a name, write a random token under it
    answer each token under the new name
                                            done if the answer is this token; else read again
"""

import time
import uuid
from typing import Any

from pipemega.errors import MeshError

_NAME = "pipemega/incarnation"

# Seconds between two polls; growing, so that thousands of ranks do not overload the store.
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.5


def agree_on_incarnation(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Return a name that all ranks of this incarnation share and no other has; collective.

    Args:
        store: a torch.distributed.Store.
        seconds: how long ranks wait for rank 0; rank 0 waits for the store's own timeout.

    Raises:
        MeshError: rank 0 did not answer in time.
    """
    if rank == 0:
        return _start(store, world_size)
    token, deadline, pause = uuid.uuid4().hex, time.monotonic() + seconds, _FIRST_POLL_SECONDS
    while time.monotonic() < deadline:
        if store.check([_NAME]):
            name = store.get(_NAME).decode()
            answer = f"{_NAME}/{name}/answer/{rank}"
            store.set(f"{_NAME}/{name}/{rank}", token)
            if store.check([answer]) and store.get(answer).decode() == token:
                return str(name)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    raise MeshError(
        f"rank {rank}: no answer from rank 0 within {seconds:g} s (mesh.timeout_seconds); check "
        f"that rank 0 was started and reaches the same store"
    )


def _start(store: Any, world_size: int) -> str:
    name = uuid.uuid4().hex
    store.set(_NAME, name)
    for other in range(1, world_size):
        store.set(f"{_NAME}/{name}/answer/{other}", store.get(f"{_NAME}/{name}/{other}"))
    return name
