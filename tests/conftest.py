"""Hypothesis, the pool of ranks, and signal handlers."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks.nccl_like import BACKENDS
from tests.ranks.pool import RankPool
from tests.ranks.training.long_runs import handlers_restored

# An example may take long on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="gloo",
        choices=["gloo", *BACKENDS],
        help="process group of the ranks of the pool; see tests/ranks/nccl_like/process_group.py",
    )


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four ranks: `pool.run(world_size, function, *args)` returns their results by rank."""
    ranks = RankPool(4, request.config.getoption("--backend"))
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after each test.

    A stopped run keeps its handlers, because its process is about to end.
    """
    with handlers_restored():
        yield
