"""Files of a traced step: without matplotlib, with it, and in a folder that is not writable."""

import logging
import sys

import pytest

from pipemega.profiling.measured_costs import write_timeline
from tests.paper.profiling.test_trace import simulated_trace

LOG = logging.getLogger("pipemega.test_timelines")


def test_without_matplotlib_all_files_but_the_picture_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = write_timeline(simulated_trace("1f1b", 4, 6), tmp_path / "new", 48, LOG)
    assert record.picture is None
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "step-3.html",
        "step-3.json",
        "step-3.trace.json",
    ]


def test_with_matplotlib_the_record_names_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    record = write_timeline(simulated_trace("zb-h1", 4, 6), tmp_path, 48, LOG)
    assert record.picture == tmp_path / "step-3.png"
    assert record.picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_not_writable_is_logged_and_the_record_is_returned(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    trace = simulated_trace("1f1b", 4, 6)
    with caplog.at_level(logging.WARNING):
        record = write_timeline(trace, tmp_path / "file" / "timelines", 48, LOG)
    assert "the timeline of step 3 could not be written" in caplog.text
    assert record.makespan == trace.timeline.makespan
    # The trace was made by the simulator.
    assert record.predicted_makespan == pytest.approx(record.makespan)
    assert record.waited == tuple(trace.waited(rank) for rank in range(4))
