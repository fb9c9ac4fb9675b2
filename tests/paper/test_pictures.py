"""Timelines as PNG, SVG and Chrome traces, and what all pictures are drawn from."""

import io
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import Image

from docs import pictures as gallery
from pipemega.errors import ConfigError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Kind
from pipemega.pipeline.pictures import Panel, png, svg, trace
from pipemega.pipeline.pictures.columns import columns
from pipemega.pipeline.pictures.palette import ON_BLACK, ON_WHITE, WORDS, ink, luminance, shade
from pipemega.pipeline.pictures.panel import Wait
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.simulate import Timeline, simulate
from tests.paper.plans import hand_made

TEXT = "{http://www.w3.org/2000/svg}text"
PATH = "{http://www.w3.org/2000/svg}path"


def timeline(name="1f1b", pp_size=2, num_microbatches=4, message=0.0):
    plan = build_plan(name, pp_size, num_microbatches)
    return simulate(plan, CostModel.shared(plan.rank_of_stage, message=message))


def later(shown, by):
    """The same timeline on a clock that starts later."""

    def moved(rows):
        return tuple(tuple(time + by for time in row) for row in rows)

    return Timeline(shown.plan, moved(shown.start), moved(shown.end), shown.peak)


def bars(text):
    """Group of bars -> how many."""
    root = ElementTree.fromstring(text)
    groups = (g for g in root.iter() if g.get("id", "").startswith("bars-"))
    return {g.get("id"): len(list(g.iter(PATH))) for g in groups}


def words(text):
    return [element.text for element in ElementTree.fromstring(text).iter(TEXT)]


# Colours


@pytest.mark.parametrize("shades", [ON_WHITE, ON_BLACK], ids=["white", "black"])
def test_kinds_and_chunks_differ_and_numbers_can_be_read_on_them(shades):
    all_of_them = [shade(kind, chunk, 4, shades) for kind in WORDS for chunk in range(4)]
    assert len(set(all_of_them)) == 16
    for colour in all_of_them:
        bright, number = luminance(colour), luminance(ink(colour))
        contrast = (max(bright, number) + 0.05) / (min(bright, number) + 0.05)
        assert contrast >= 4.5, f"{ink(colour)} on {colour}"


def test_kinds_stay_apart_in_black_and_white():
    def lightness(colour):  # CIE L*, 0 to 100
        return 116 * luminance(colour) ** (1 / 3) - 16

    shades = [lightness(shade(kind, chunk, 2)) for kind in WORDS for chunk in (0, 1)]
    assert min(abs(a - b) for a, b in combinations(shades, 2)) > 4
    firsts = [lightness(shade(kind, 0, 2)) for kind in WORDS]
    assert min(abs(a - b) for a, b in combinations(firsts, 2)) > 10


# What is drawn


def test_a_wait_names_the_step_of_another_rank_that_it_was_for():
    panel = Panel(simulate(hand_made("F0 B0", "F0 B0"), CostModel.uniform(2)))
    assert panel.waits(0) == [Wait(1, 3.0, Instruction.parse("B0@1"))]
    assert panel.waits(1) == [Wait(0, 1.0, Instruction.parse("F0@0"))]


def test_a_measured_wait_for_no_other_rank_says_so():
    shown = Timeline(hand_made("F0 F1 B0 B1"), ((5, 7, 8, 10),), ((6, 8, 10, 12),), (2,))
    assert Panel(shown).waits(0) == [Wait(1, 1, None)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kept", [0.5, 1.0, 3.0])
def test_what_is_held_reaches_the_peak_that_was_simulated_and_ends_at_nothing(name, kept):
    plan = build_plan(name, 4, 6)
    costs = CostModel.uniform(plan.num_stages, activation=1.0, kept=kept)
    panel = Panel(simulate(plan, costs), costs=costs)
    for rank, peak in enumerate(panel.timeline.peak):
        held = panel.held(rank)
        assert max(max(step) for step in held) == pytest.approx(peak)
        assert held[-1].after == pytest.approx(0)


@pytest.mark.parametrize("by", [0.0, 1234.5])
def test_columns_give_back_the_timeline_from_time_0(by):
    shown = timeline("zb-v", 3, 5, message=1 / 3)
    written = columns(Panel(later(shown, by)))
    assert written["counts"] == [len(program) for program in shown.plan.programs]
    at = 0
    for rank, count in enumerate(written["counts"]):
        now = 0
        for step, start, end in shown.steps(rank):
            start_of_it = now + written["gaps"][at]
            now = start_of_it + written["times"][at]
            assert start_of_it * written["tick"] == pytest.approx(start, abs=1e-4)
            assert now * written["tick"] == pytest.approx(end, abs=1e-4)
            said = (written["kinds"][at], written["stages"][at], written["batches"][at])
            assert Instruction(Kind(said[0]), *said[1:]) == step
            at += 1
        assert count
    assert at == len(written["kinds"]) == len(written["during"]) == len(written["after"])


def test_times_in_simple_shares_are_written_in_small_numbers():
    written = columns(Panel(timeline("1f1b", 2, 4)))
    assert (written["tick"], set(written["times"])) == (1.0, {1, 2})


# SVG


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_every_instruction_has_its_bar_and_its_number(name):
    shown = timeline(name, 4, 8)
    text = svg(shown)
    expected = {}
    panel = Panel(shown)
    for step in shown.plan.steps():
        group = f"bars-0-{step.kind.value}-{panel.chunk_of_stage[step.stage]}"
        expected[group] = expected.get(group, 0) + 1
    assert bars(text) == expected
    # Beside the numbers there are the ticks of the axis: 0, 5 and so on.
    numbers = Counter(word for word in words(text) if re.fullmatch("[0-7]", word))
    numbers.subtract(str(step.microbatch) for step in shown.plan.steps())
    assert +numbers == Counter("05")
    assert min(numbers.values()) == 0


def test_the_title_has_name_sizes_makespan_and_bubble_in_the_unit():
    found = words(svg(timeline(), unit="ms"))
    for word in ("1f1b, 2 ranks, 4 micro-batches", "makespan 15 ms, bubble 20.0%", "time (ms)"):
        assert word in found
    assert {"rank 0", "rank 1", "forward", "backward", "waiting"} <= set(found)


def test_measured_stands_below_predicted_on_the_same_axis():
    shown = timeline()
    text = svg(shown, measured=later(timeline(message=0.5), 99.0))
    assert sum(bars(text).values()) == 2 * sum(map(len, shown.plan.programs))
    titles = [word for word in words(text) if word.endswith("1f1b, 2 ranks, 4 micro-batches")]
    assert [title.split(":")[0] for title in titles] == ["predicted", "measured"]
    left = [float(x) for x in re.findall(r'id="bars-\d-F-0">\s*<path d="M ([\d.]+)', text)]
    assert left[0] == left[1]
    assert "time (units)" in words(text)


def test_memory_is_drawn_below_with_the_peak_of_each_rank():
    found = words(svg(timeline(), memory=True, memory_unit="GB"))
    assert "memory held (GB)" in found
    assert "at most 2" in found
    assert "memory held (GB)" not in words(svg(timeline(), memory_unit="GB"))


def test_the_same_picture_is_the_same_file_and_says_no_date():
    first, second = (svg(timeline("zb-v"), memory=True) for _ in range(2))
    assert first == second
    assert "date" not in first.lower()


def test_a_title_is_written_as_it_is():
    title = 'a < b & $c$ "10.000" style="x"'
    assert title in words(svg(Panel(timeline(), title)))


def test_numbers_that_would_not_fit_are_left_out():
    found = words(svg(timeline("zb-v", 8, 128)))
    assert "127" not in found


def test_steps_that_take_no_time_are_drawn():
    plan = hand_made("F0 F1 B0 B1")
    assert sum(bars(svg(simulate(plan, CostModel.uniform(1, 0, 0, 0)), memory=True)).values()) == 4


# PNG


@pytest.mark.parametrize(
    ("sizes", "least"), [(("1f1b", 2, 4), (1200, 200)), (("zb-v", 32, 64), (3000, 500))]
)
def test_a_png_opens_on_white_in_a_size_to_look_at(sizes, least):
    with Image.open(io.BytesIO(png(timeline(*sizes), memory=True))) as image:
        assert least[0] <= image.width <= 3300
        assert least[1] <= image.height <= 3300
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_a_large_svg_has_its_bars_as_an_image():
    text = svg(timeline("1f1b", 32, 256))
    assert len(text) < 1_000_000
    assert "<image" in text


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pipemega\[pictures\]', or ask for html"):
        png(timeline())


def test_a_picture_changes_no_setting_of_matplotlib():
    before = dict(matplotlib.rcParams)
    png(timeline())
    assert dict(matplotlib.rcParams) == before


def test_the_package_is_imported_without_matplotlib():
    code = "import sys, pipemega.pipeline.pictures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Traces


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_trace_has_an_event_per_step_and_an_arrow_per_message(name):
    shown = timeline(name, 3, 4, message=0.5)
    written = json.loads(trace(shown, unit="ms"))
    events = written["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "MXCsf"}
    assert sum(map(len, by_phase.values())) == len(events)
    steps = {event["name"]: event for event in by_phase["X"]}
    assert len(steps) == len(by_phase["X"]) == sum(map(len, shown.plan.programs))
    for rank in range(3):
        for step, start, end in shown.steps(rank):
            event = steps[str(step)]
            assert (event["pid"], event["tid"]) == (rank, 0)
            assert event["ts"] == pytest.approx(1000 * start, abs=2e-3)
            assert event["dur"] == pytest.approx(1000 * (end - start), abs=2e-3)
    homes = shown.plan.rank_of_stage
    crossings = sum(a != b for a, b in pairwise(homes))
    assert len(by_phase["s"]) == len(by_phase["f"]) == 2 * 4 * crossings
    ends = {event["id"]: event for event in by_phase["f"]}
    for event in by_phase["s"]:
        assert event["ts"] <= ends[event["id"]]["ts"]
        assert event["pid"] != ends[event["id"]]["pid"]


def test_the_counters_of_a_trace_rise_to_the_peak_and_end_at_nothing():
    shown = timeline("1f1b", 3, 6)
    for rank in range(3):
        counts = [
            event["args"]["held"]
            for event in json.loads(trace(shown))["traceEvents"]
            if event["ph"] == "C" and event["pid"] == rank
        ]
        assert (max(counts), counts[-1]) == (shown.peak[rank], 0)


def test_a_trace_names_its_processes_and_what_steps_waited_for():
    events = json.loads(trace(timeline(), measured=timeline(), unit="s"))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named[0] == "predicted: 1f1b, 2 ranks, 4 micro-batches: rank 0"
    assert named[3] == "measured: 1f1b, 2 ranks, 4 micro-batches: rank 1"
    (first,) = [e for e in events if e["name"] == "F0@1" and e["pid"] == 3]
    assert first["ts"] == 1e6
    assert first["args"]["waited for"] == "F0@0"
    assert first["args"]["waited"] == 1


# The pictures of README and docs


def test_every_schedule_has_its_picture_in_the_docs():
    page = (gallery.FOLDER.parent / "schedules.md").read_text(encoding="utf-8")
    for name in SCHEDULES:
        assert f"](pictures/{name}.svg)" in page
        assert (gallery.FOLDER / f"{name}.svg").is_file()
    assert {path.stem for path in gallery.FOLDER.iterdir()} == set(gallery.NAMES)
    readme = gallery.FOLDER.parents[1] / "README.md"
    assert "](docs/pictures/schedules.svg)" in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_pictures_of_the_docs_are_what_is_drawn_today(name):
    """Their bars and words; another matplotlib may place them a hair's breadth elsewhere."""
    there = (gallery.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    drawn = gallery.picture(name)
    assert bars(there) == bars(drawn)
    assert words(there) == words(drawn)
