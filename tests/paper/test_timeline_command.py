"""`python -m pipemega timeline`, on the file of a step that was measured."""

import importlib.util
import json

import pytest

from pipemega.cli import main
from tests.paper.test_trace import COSTS, played


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step-3.json"
    path.write_text(played("zb-v", 2, 4).to_json())
    return path


def test_text_shows_both_drawings_and_what_each_rank_and_stage_did(file, capsys):
    assert main(["timeline", str(file), "--width", "100"]) == 0
    shown = capsys.readouterr().out
    parts = shown.split("\n\n")
    assert parts[0] == "step 3: zb-v, 2 ranks, 4 stages, 4 micro-batches"
    measured, predicted = (part.splitlines() for part in parts[1:3])
    assert (measured[0], predicted[0]) == ("measured", "predicted, of the measured costs")
    # It was played by the simulator, so that there is no difference.
    assert measured[1:] == predicted[1:]
    assert all(len(line) <= 100 for line in measured)
    figures = [line.split() for line in parts[3].splitlines()]
    assert figures[1][:2] == ["makespan,", "ms"]
    assert figures[1][2] == figures[1][3]
    assert parts[4].splitlines()[0].split()[:3] == ["rank", "busy,", "ms"]
    stages = [line.split() for line in parts[5].splitlines()[1:]]
    assert [float(row[1]) for row in stages] == [1e3 * time for time in COSTS.forward]
    assert "the longest waits" in shown


def test_a_trace_without_memory_counts_microbatches(tmp_path, capsys):
    path = tmp_path / "step-3.json"
    path.write_text(played("1f1b", 4, 6, memory=False).to_json())
    assert main(["timeline", str(path)]) == 0
    assert "most held, micro-batches" in capsys.readouterr().out


def test_a_page_and_a_chrome_trace_are_written_beside_the_file(file, capsys):
    assert main(["timeline", str(file), "--format", "html"]) == 0
    assert main(["timeline", str(file), "--format", "trace"]) == 0
    page = file.with_suffix(".html").read_text()
    assert "measured: zb-v, step 3" in page
    assert "predicted, of the measured costs" in page
    events = json.loads(file.with_suffix(".trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert str(file.with_suffix(".html")) in capsys.readouterr().out


def test_pictures_show_measured_and_predicted(file, capsys):
    drawn = [main(["timeline", str(file), "--format", form]) for form in ("png", "svg")]
    if importlib.util.find_spec("matplotlib") is None:
        assert drawn == [2, 2]
        assert "pip install 'pipemega[pictures]'" in capsys.readouterr().err
    else:
        assert drawn == [0, 0]
        assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "measured: zb-v, step 3" in file.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "step-3.json' cannot be read"),
        ("{}", "this is no measured timeline: its key 'format' should be"),
        ("F0 B0", "a measured timeline in JSON was expected"),
    ],
)
def test_a_file_that_is_no_timeline_is_one_line_and_exit_code_2(content, words, tmp_path, capsys):
    path = tmp_path / "step-3.json"
    if content is not None:
        path.write_text(content)
    assert main(["timeline", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
