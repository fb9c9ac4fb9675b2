"""`python -m pipemega timeline` on the file of a measured step."""

import importlib.util
import json
import re

import pytest

from pipemega.cli import main
from tests.paper.profiling.test_trace import COSTS, simulated_trace, with_phases


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step-3.json"
    path.write_text(simulated_trace("zb-v", 2, 4).to_json())
    return path


def test_text_shows_both_timelines_and_tables_of_ranks_and_stages(file, capsys):
    assert main(["timeline", str(file), "--width", "100"]) == 0
    shown = capsys.readouterr().out
    parts = shown.split("\n\n")
    assert parts[0] == "step 3: zb-v, 2 ranks, 4 stages, 4 micro-batches"
    measured, predicted = (part.splitlines() for part in parts[1:3])
    assert (measured[0], predicted[0]) == ("measured", "simulated with the measured costs")
    # The trace was made by the simulator, so they are equal.
    assert measured[1:] == predicted[1:]
    assert all(len(line) <= 100 for line in measured)
    figures = [line.split() for line in parts[3].splitlines()]
    assert figures[1][:2] == ["makespan,", "ms"]
    assert figures[1][2] == figures[1][3]
    assert parts[4].splitlines()[0].split()[:3] == ["rank", "busy,", "ms"]
    stages = [line.split() for line in parts[5].splitlines()[1:]]
    assert [float(row[1]) for row in stages] == [1e3 * time for time in COSTS.forward]
    assert "longest waits" in shown


def test_text_shows_the_parts_of_the_step_and_their_sum(tmp_path, capsys):
    path = tmp_path / "step-3.json"
    path.write_text(with_phases(simulated_trace("zb-v", 2, 4)).to_json())
    assert main(["timeline", str(path)]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    totals = {line.split(",")[0]: line.split()[2:] for line in parts[3].splitlines()[1:]}
    (table,) = [part.splitlines() for part in parts if part.startswith("parts of the step, ms")]
    assert table[1].split() == [
        "rank", "data", "compute", "wait", "gradient", "reduction", "optimizer", "other", "step"
    ]  # fmt: skip
    for line in table[2:]:
        _, *times, step = map(float, line.split())
        assert sum(times) == pytest.approx(step, rel=1e-3)
        assert totals["step"] == [line.split()[-1]] * 2


def test_the_page_and_the_chrome_trace_show_the_phases_around_the_pipeline(tmp_path, capsys):
    path = tmp_path / "step-3.json"
    trace = with_phases(simulated_trace("zb-v", 2, 4))
    path.write_text(trace.to_json())
    assert main(["timeline", str(path), "--format", "html"]) == 0
    assert main(["timeline", str(path), "--format", "trace"]) == 0
    page = path.with_suffix(".html").read_text()
    assert "parts of the step, ms" in page
    (written,) = re.findall(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    measured, simulated = json.loads(written)["panels"]
    # The simulated pipeline is equal, and so are the phases around it.
    assert measured["outside"] == simulated["outside"]
    assert measured["outside"][0][0] == ["data", 0.0, 2000.0]
    assert measured["makespan"] == pytest.approx(1e3 * trace.step_interval)
    events = json.loads(path.with_suffix(".trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    times = {event["name"]: event["dur"] / 1e6 for event in drawn if event["cat"] == "phase"}
    assert times["optimizer"] == pytest.approx(3.0)
    # With the waits between them, the bars are as long as the step.
    parts = trace.parts(0)
    bars = sum(event["dur"] for event in drawn) / 1e6
    assert bars + parts["wait"] + parts["messages"] + 0.5 == pytest.approx(trace.step_time(0))


def test_a_trace_without_memory_counts_microbatches(tmp_path, capsys):
    path = tmp_path / "step-3.json"
    path.write_text(simulated_trace("1f1b", 4, 6, memory=False).to_json())
    assert main(["timeline", str(path)]) == 0
    assert "peak memory, micro-batches" in capsys.readouterr().out


def test_a_page_and_a_chrome_trace_are_written_next_to_the_file(file, capsys):
    assert main(["timeline", str(file), "--format", "html"]) == 0
    assert main(["timeline", str(file), "--format", "trace"]) == 0
    page = file.with_suffix(".html").read_text()
    assert "measured: zb-v, step 3" in page
    assert "simulated with the measured costs" in page
    events = json.loads(file.with_suffix(".trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert str(file.with_suffix(".html")) in capsys.readouterr().out


def test_pictures_show_measured_and_simulated(file, capsys):
    drawn = [main(["timeline", str(file), "--format", form]) for form in ("png", "svg")]
    if importlib.util.find_spec("matplotlib") is None:
        assert drawn == [2, 2]
        assert "pip install -e '.[pictures]'" in capsys.readouterr().err
    else:
        assert drawn == [0, 0]
        assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "measured: zb-v, step 3" in file.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "step-3.json' cannot be read"),
        ("{}", "this is not a measured timeline: its key 'format' should be"),
        ("F0 B0", "expected a measured timeline in JSON"),
    ],
)
def test_a_file_that_is_not_a_timeline_gives_a_one_line_error_and_exit_code_2(
    content, words, tmp_path, capsys
):
    path = tmp_path / "step-3.json"
    if content is not None:
        path.write_text(content)
    assert main(["timeline", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
