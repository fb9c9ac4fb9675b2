"""Hypothesis, the pool of ranks, signal handlers, and the collector of garbage."""

import gc
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


def pytest_sessionstart() -> None:
    # Modules and tests are a million objects, none of them garbage. The collector of garbage reads
    # them again and again: half of the time until the first test, and some of each test.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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
