"""Hypothesis, groups of tests that run in parallel, and the pool of ranks."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

# An example may take long on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests with ranks for `pytest -n 2 --dist loadgroup`.

    Tests that start processes of their own often wait for them, so they run beside those of the
    pool. A second pool would only compete for the cores.
    """
    for item in items:
        if "ranks" in item.path.parts or "faults" in item.path.parts:
            uses_pool = "pool" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("pool" if uses_pool else "processes"))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four gloo ranks: `pool.run(world_size, function, *args)` returns their results by rank."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after each test.

    A stopped run keeps its handlers, because its process is about to end.
    """
    with handlers_restored():
        yield
