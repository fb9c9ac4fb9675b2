"""In which part of a store the ranks of one life of a run meet.

torchrun starts all ranks again when one has failed (--max-restarts), and mostly keeps the store
that they met through. What the dead have left there, their addresses and why they died, would be
taken for that of the living. The number of restarts does not tell lives apart: with several nodes
each torchrun counts for itself. So rank 0 gives each life a name, and every rank makes sure that
the name which it finds there is of its own life:

    rank 0                                  rank r
    writes a new name
                                            reads a name, writes a mark of its own under it
    answers each mark under the new name
                                            an answer, and of its own mark? else it reads again
"""

import time
import uuid
from typing import Any

from pipemega.errors import MeshError

_NAME = "pipemega/life"

# Seconds between two looks; longer each time, so that thousands of ranks do not drown the store.
_FIRST_GLANCE, _LONGEST_GLANCE = 0.01, 0.5


def name_of_this_life(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """A name that the ranks of this life share and no other life had; collective.

    Args:
        store: a torch.distributed.Store.
        seconds: how long to wait for rank 0; how long that waits is the store's.

    Raises:
        MeshError: rank 0 did not come.
    """
    if rank == 0:
        return _begin(store, world_size)
    mark, deadline, glance = uuid.uuid4().hex, time.monotonic() + seconds, _FIRST_GLANCE
    while time.monotonic() < deadline:
        if store.check([_NAME]):
            life = store.get(_NAME).decode()
            answer = f"{_NAME}/{life}/met/{rank}"
            store.set(f"{_NAME}/{life}/{rank}", mark)
            if store.check([answer]) and store.get(answer).decode() == mark:
                return str(life)
        time.sleep(glance)
        glance = min(2 * glance, _LONGEST_GLANCE)
    raise MeshError(
        f"rank {rank} has not met rank 0 within {seconds:g} s (mesh.timeout_seconds): has it been "
        f"started, and does it reach the same store?"
    )


def _begin(store: Any, world_size: int) -> str:
    life = uuid.uuid4().hex
    store.set(_NAME, life)
    for other in range(1, world_size):
        store.set(f"{_NAME}/{life}/met/{other}", store.get(f"{_NAME}/{life}/{other}"))
    return life
