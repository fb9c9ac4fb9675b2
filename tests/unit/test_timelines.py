"""What a run leaves of a step that was timed, where it cannot leave all."""

import logging
import sys

import pytest

from pipemega.training.timelines import write_timeline
from tests.paper.test_trace import played

LOG = logging.getLogger("pipemega.test_timelines")


def test_without_matplotlib_there_is_everything_but_the_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = write_timeline(played("1f1b", 4, 6), tmp_path / "new", 48, LOG)
    assert record.picture is None
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "step-3.html",
        "step-3.json",
        "step-3.trace.json",
    ]


def test_with_matplotlib_the_record_names_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    record = write_timeline(played("zb-h1", 4, 6), tmp_path, 48, LOG)
    assert record.picture == tmp_path / "step-3.png"
    assert record.picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_reported_and_the_record_is_there(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    trace = played("1f1b", 4, 6)
    with caplog.at_level(logging.WARNING):
        record = write_timeline(trace, tmp_path / "file" / "timelines", 48, LOG)
    assert "the timeline of step 3 could not be written" in caplog.text
    assert record.makespan == trace.timeline.makespan
    # It was played by the simulator.
    assert record.predicted_makespan == pytest.approx(record.makespan)
    assert record.waited == tuple(trace.waited(rank) for rank in range(4))
