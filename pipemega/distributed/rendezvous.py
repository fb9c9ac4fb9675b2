"""Agree on a name for this incarnation of a run, so that ranks never read stale store keys.

torchrun restarts all ranks when one has failed (--max-restarts), and usually keeps the store. The
restarted ranks would read keys of the earlier ones, such as addresses and failure reports. The
restart count does not identify an incarnation: with several nodes, each torchrun has its own count.
So rank 0 creates a name, and every rank checks that the name it has read is that of the current
incarnation:

    rank 0                                  rank r
    write a new name
                                            read a name, write a random token under it
    answer the tokens of its children
                                            if the answer is this token: answer its own children;
                                            else read again

The ranks are a binomial tree: the parent of a rank is the rank without its lowest bit. So no rank
sends more messages than a multiple of the logarithm of the number of ranks.
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
        seconds: how long ranks wait for their parents; these wait for the store's own timeout.

    Raises:
        MeshError: the parent did not answer in time.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(_NAME, name)
    else:
        name = _confirmed_name(store, rank, seconds)
    for child in _children(rank, world_size):
        store.set(f"{_NAME}/{name}/answer/{child}", store.get(f"{_NAME}/{name}/{child}"))
    return name


def _children(rank: int, world_size: int) -> list[int]:
    """Return the ranks whose parent this is, the largest subtree first."""
    # The number of trailing zeros; rank 0 has all powers of 2.
    bits = (rank & -rank).bit_length() - 1 if rank else (world_size - 1).bit_length()
    children = [rank + (1 << bit) for bit in reversed(range(bits))]
    return [child for child in children if child < world_size]


def _confirmed_name(store: Any, rank: int, seconds: float) -> str:
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
    parent = rank & (rank - 1)
    raise MeshError(
        f"rank {rank}: no answer from rank {parent} within {seconds:g} s (mesh.timeout_seconds); "
        f"check that rank {parent} was started and reaches the same store"
    )
