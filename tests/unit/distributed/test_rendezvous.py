"""Restarted ranks agree on a new incarnation and do not read the keys of the earlier one."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pipemega.distributed.topology import agree_on_incarnation
from pipemega.errors import MeshError


def incarnations(store: dist.Store, delays: list[float]) -> list[str]:
    """The result of each rank, in one thread each, started after its delay in seconds."""

    def agree(rank: int) -> str:
        time.sleep(delays[rank])
        return agree_on_incarnation(store, rank, len(delays), 20.0)

    with ThreadPoolExecutor(len(delays)) as threads:
        return list(threads.map(agree, range(len(delays))))


@pytest.mark.parametrize("delays", [[0.0, 0.1, 0.0], [0.2, 0.0, 0.1]], ids=["first", "last"])
def test_each_incarnation_has_its_own_name_if_rank_0_starts_first_or_last(
    delays: list[float],
) -> None:
    """Also if the other ranks read the earlier name and its answers before the new name."""
    store, seen = dist.HashStore(), set()
    for _ in range(3):
        names = incarnations(store, delays)
        assert len(set(names)) == 1
        seen.add(names[0])
    assert len(seen) == 3


def test_an_error_says_that_rank_0_does_not_answer() -> None:
    store = dist.HashStore()
    incarnations(store, [0.0, 0.0])
    with pytest.raises(MeshError, match=r"rank 1: no answer from rank 0 within 0\.3 s"):
        agree_on_incarnation(store, 1, 2, 0.3)
