"""What a rank sends at start-up does not grow faster than the logarithm of the world."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipemega.distributed import mesh
from pipemega.distributed.topology import Topology, agree_on_incarnation


class CountingStore:
    """A store of one rank; counts its messages, except repeated polls of one key."""

    def __init__(self, store: Any, counts: dict[int, set[Any]], rank: int) -> None:
        self._store, self._seen = store, counts[rank]

    def set(self, key: str, value: Any) -> None:
        self._seen.add(("set", key))
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        self._seen.add(("get", key))
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        self._seen.add(("check", *keys))
        return bool(self._store.check(keys))


@pytest.mark.parametrize("ranks", [64, 512])
def test_no_rank_sends_more_store_messages_than_a_multiple_of_the_logarithm(ranks: int) -> None:
    """Rank 0 answered every other rank itself: 1023 messages in a world of 512."""
    counts: dict[int, set[Any]] = defaultdict(set)
    store, names = dist.HashStore(), {}

    def run(rank: int) -> None:
        counting = CountingStore(store, counts, rank)
        names[rank] = agree_on_incarnation(counting, rank, ranks, 60.0)

    for rank in range(ranks):
        counts[rank] = set()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names.values())) == 1
    assert len(names) == ranks
    levels = ranks.bit_length() - 1
    assert max(map(len, counts.values())) <= 5 + 2 * levels
    assert len(counts[0]) == 1 + 2 * levels


@pytest.fixture
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    for name in ("new_group", "all_reduce", "barrier", "all_gather_object"):
        plain = getattr(dist, name)

        def counted(*args: Any, _plain: Any = plain, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _plain(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    yield calls
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "topology", [Topology(pipeline=4, data=4, tensor=4), Topology(pipeline=8, data=8, tensor=8)]
)
def test_the_groups_and_collectives_of_a_rank_do_not_depend_on_the_number_of_ranks(
    topology: Topology, counted_calls: list[str]
) -> None:
    world = topology.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    mesh.build_mesh(topology, torch.device("cpu"), timedelta(seconds=30))
    # A group for each axis; one all-reduce opens each of them and the world, one checks counts.
    assert counted_calls.count("new_group") == 3
    assert counted_calls.count("all_reduce") == 5
    assert counted_calls.count("barrier") == 1
    assert counted_calls.count("all_gather_object") == 0
