"""The logger of a rank: its file, and the handlers of the script."""

import logging

import pytest

from pipemega.monitor import configure_logging, get_logger


class Collecting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def of_the_script():
    """A handler of the root logger, as from logging.basicConfig()."""
    handler = Collecting()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
    configure_logging(0, "info", (0,), None)


def test_handlers_of_the_script_get_what_the_rank_shows_and_its_file_gets_all(
    of_the_script, tmp_path
):
    file = tmp_path / "logs" / "rank_1.log"
    configure_logging(1, "info", (0,), file)
    get_logger(1).info("only in the file")
    get_logger(1).warning("in both")
    assert of_the_script.messages == ["in both"]
    lines = file.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "rank 1 INFO: only in the file",
        "rank 1 WARNING: in both",
    ]
    configure_logging(1, "info", "all", None)
    get_logger(1).info("shown by all ranks")
    assert of_the_script.messages == ["in both", "shown by all ranks"]


def test_a_restarted_run_appends_to_its_log_file(of_the_script, tmp_path):
    file = tmp_path / "rank_0.log"
    for run in range(2):
        configure_logging(0, "info", (0,), file)
        get_logger().info("run %d", run)
        configure_logging(0, "info", (0,), None)  # closes the file
    assert [line[-5:] for line in file.read_text().splitlines()] == ["run 0", "run 1"]
