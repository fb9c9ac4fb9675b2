"""What all tests share: the pool of ranks."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four gloo ranks: `pool.run(world_size, function, *args)` returns their results by rank."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()
