"""Fault tests: the table of results, and the marker of all tests in this folder.

pytest -m faults tests/faults                                         all of them, minutes
pytest -m faults tests/faults --faults-table docs/reliability.md      the table, too (make faults)
pytest tests/faults                                                   the quick ones
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.fault_trials import FaultFreeRuns
from tests.faults.table import ResultTable

_RESULTS = pytest.StashKey[ResultTable]()
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", help="write the table of the sweep into this page")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = ResultTable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    results = config.stash[_RESULTS]
    if not results.rows:
        return
    terminalreporter.section("faults")
    terminalreporter.write(results.markdown())
    page = config.getoption("--faults-table", None)
    if page:
        results.write_into(Path(page))


@pytest.fixture
def results(request: pytest.FixtureRequest) -> ResultTable:
    return request.config.stash[_RESULTS]


@pytest.fixture(scope="session")
def fault_free() -> Iterator[FaultFreeRuns]:
    with _scratch() as folder:
        yield FaultFreeRuns(folder)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for a run, in memory if possible.

    On a slow disk the runs would spend most of their time in writes, and most kills would hit them
    there.
    """
    with _scratch() as folder:
        yield folder


@contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where, prefix="pipemega-faults-") as folder:
        yield Path(folder)
