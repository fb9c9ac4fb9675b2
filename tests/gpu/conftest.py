"""The fixture `run` of the tests on several ranks."""

from pathlib import Path

import pytest

from tests.gpu.devices import Run, runner
from tests.ranks.pool import RankPool


@pytest.fixture
def run(pool: RankPool, tmp_path: Path) -> Run:
    """Calls a function on several ranks: run(device, num_ranks, function, **arguments)."""
    return runner(pool, tmp_path)
