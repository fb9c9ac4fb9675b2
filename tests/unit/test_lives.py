"""Ranks that are started again meet each other, and not what the dead have left."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pipemega.errors import MeshError
from pipemega.lives import name_of_this_life


def names(store: dist.Store, delays: list[float]) -> list[str]:
    """What each rank finds, one a thread, begun so many seconds later."""

    def find(rank: int) -> str:
        time.sleep(delays[rank])
        return name_of_this_life(store, rank, len(delays), 20.0)

    with ThreadPoolExecutor(len(delays)) as threads:
        return list(threads.map(find, range(len(delays))))


@pytest.mark.parametrize("delays", [[0.0, 0.1, 0.0], [0.2, 0.0, 0.1]], ids=["first", "last"])
def test_each_life_has_a_name_of_its_own_whether_rank_0_comes_first_or_last(
    delays: list[float],
) -> None:
    """Also where the others find the name of the dead, and their answers, before the new one."""
    store, seen = dist.HashStore(), set()
    for _ in range(3):
        found = names(store, delays)
        assert len(set(found)) == 1
        seen.add(found[0])
    assert len(seen) == 3


def test_a_rank_0_that_does_not_come_is_missed() -> None:
    store = dist.HashStore()
    names(store, [0.0, 0.0])
    with pytest.raises(MeshError, match=r"rank 1 has not met rank 0 within 0\.3 s"):
        name_of_this_life(store, 1, 2, 0.3)
