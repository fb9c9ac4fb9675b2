"""Faults: the ledger of what was tried, and the marker of everything in this folder.

pytest -m faults tests/faults                                         all of them, minutes
pytest -m faults tests/faults --faults-table docs/reliability.md      and the table (make faults)
pytest tests/faults                                                   the quick ones
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.story import Undisturbed
from tests.faults.table import Ledger

_LEDGER = pytest.StashKey[Ledger]()
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", help="write the table of the sweep into this page")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEDGER] = Ledger()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    ledger = config.stash[_LEDGER]
    if not ledger.rows:
        return
    terminalreporter.section("faults")
    terminalreporter.write(ledger.markdown())
    page = config.getoption("--faults-table", None)
    if page:
        ledger.write_into(Path(page))


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Ledger:
    return request.config.stash[_LEDGER]


@pytest.fixture(scope="session")
def undisturbed() -> Iterator[Undisturbed]:
    with _scratch() as folder:
        yield Undisturbed(folder)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for a run, in memory where that can be had.

    A process that is killed leaves behind what it wrote, on whatever disk; and a run that waits for
    a disk is at one place most of the time.
    """
    with _scratch() as folder:
        yield folder


@contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where, prefix="pipemega-faults-") as folder:
        yield Path(folder)
