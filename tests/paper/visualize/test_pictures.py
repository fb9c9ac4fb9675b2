"""Timelines as PNG, SVG and Chrome trace, and the data that they are drawn from."""

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

from docs import pictures as docs_pictures
from pipemega.errors import ConfigError
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel, Timeline, simulate
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.visualize import Panel, chrome_trace, png, svg
from pipemega.pipeline.visualize.figure import Wait, draw_figure
from pipemega.pipeline.visualize.page import panel_data
from pipemega.pipeline.visualize.palette import (
    DARK,
    KIND_NAMES,
    LIGHT,
    luminance,
    shade,
    text_colour,
)
from tests.paper.hand_made_plans import hand_made
from tests.sampling import some_cases

TEXT = "{http://www.w3.org/2000/svg}text"
PATH = "{http://www.w3.org/2000/svg}path"


def timeline(name="1f1b", pp_size=2, num_microbatches=4, message=0.0):
    plan = build_plan(name, pp_size, num_microbatches)
    return simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage, message=message))


def shifted(shown, by):
    """Return the same timeline on a clock that starts later."""

    def moved(rows):
        return tuple(tuple(time + by for time in row) for row in rows)

    return Timeline(shown.plan, moved(shown.start), moved(shown.end), shown.peak)


def bars(text):
    """Return the number of bars of each group."""
    root = ElementTree.fromstring(text)
    groups = (g for g in root.iter() if g.get("id", "").startswith("bars-"))
    return {g.get("id"): len(list(g.iter(PATH))) for g in groups}


def words(text):
    return [element.text for element in ElementTree.fromstring(text).iter(TEXT)]


# Colours


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_of_kinds_and_chunks_differ_and_contrast_with_their_numbers(theme):
    colours = [shade(kind, chunk, 4, theme.shades) for kind in KIND_NAMES for chunk in range(4)]
    assert len(set(colours)) == 16
    for colour in colours:
        bright, number = luminance(colour), luminance(text_colour(colour))
        contrast = (max(bright, number) + 0.05) / (min(bright, number) + 0.05)
        assert contrast >= 4.5, f"{text_colour(colour)} on {colour}"


def test_kinds_differ_in_lightness():
    def lightness(colour):  # CIE L*, 0 to 100
        return 116 * luminance(colour) ** (1 / 3) - 16

    shades = [lightness(shade(kind, chunk, 2)) for kind in KIND_NAMES for chunk in (0, 1)]
    assert min(abs(a - b) for a, b in combinations(shades, 2)) > 4
    firsts = [lightness(shade(kind, 0, 2)) for kind in KIND_NAMES]
    assert min(abs(a - b) for a, b in combinations(firsts, 2)) > 10


# Data of the drawings


def test_a_wait_names_the_awaited_step_of_another_rank():
    panel = Panel(simulate(hand_made("F0 B0", "F0 B0"), CostModel.uniform(2)))
    assert panel.waits(0) == [Wait(1, 3.0, Instruction.parse("B0@1"))]
    assert panel.waits(1) == [Wait(0, 1.0, Instruction.parse("F0@0"))]


def test_a_measured_wait_for_no_other_rank_names_no_step():
    shown = Timeline(hand_made("F0 F1 B0 B1"), ((5, 7, 8, 10),), ((6, 8, 10, 12),), (2,))
    assert Panel(shown).waits(0) == [Wait(1, 1, None)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kept", [0.5, 1.0, 3.0])
def test_the_memory_of_a_panel_reaches_the_simulated_peak_and_ends_at_zero(name, kept):
    plan = build_plan(name, 4, 6)
    costs = CostModel.uniform(plan.num_stages, kept=kept)
    panel = Panel(simulate(plan, costs), costs=costs)
    for rank, peak in enumerate(panel.timeline.peak):
        held = panel.held(rank)
        assert max(max(step) for step in held) == pytest.approx(peak)
        assert held[-1].after == pytest.approx(0)


@pytest.mark.parametrize("by", [0.0, 1234.5])
def test_panel_data_encodes_the_timeline_from_time_0(by):
    shown = timeline("zb-v", 3, 5, message=1 / 3)
    written = panel_data(Panel(shifted(shown, by)))
    assert written["counts"] == [len(program) for program in shown.plan.programs]
    at = 0
    for rank, count in enumerate(written["counts"]):
        now = 0
        for step, start, end in shown.steps(rank):
            step_start = now + written["gaps"][at]
            now = step_start + written["times"][at]
            assert step_start * written["tick"] == pytest.approx(start, abs=1e-4)
            assert now * written["tick"] == pytest.approx(end, abs=1e-4)
            kind, stage, batch = (written[key][at] for key in ("kinds", "stages", "batches"))
            assert Instruction(Kind(kind), stage, batch) == step
            at += 1
        assert count
    assert at == len(written["kinds"]) == len(written["during"]) == len(written["after"])


def test_times_are_encoded_as_small_integers():
    written = panel_data(Panel(timeline("1f1b", 2, 4)))
    assert (written["tick"], set(written["times"])) == (1.0, {1, 2})


# SVG


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_every_step_has_a_bar_and_a_number(name):
    shown = timeline(name, 4, 8)
    text = svg(shown)
    expected = {}
    panel = Panel(shown)
    for step in shown.plan.steps():
        group = f"bars-0-{step.kind.value}-{panel.chunk_of_stage[step.stage]}"
        expected[group] = expected.get(group, 0) + 1
    assert bars(text) == expected
    # The ticks of the axis are numbers too: 0, 5 and so on.
    numbers = Counter(word for word in words(text) if re.fullmatch("[0-7]", word))
    numbers.subtract(str(step.microbatch) for step in shown.plan.steps())
    assert +numbers == Counter("05")
    assert min(numbers.values()) == 0


def test_the_title_has_name_sizes_makespan_and_bubble():
    found = words(svg(timeline(), unit="ms"))
    for word in ("1f1b, 2 ranks, 4 micro-batches", "makespan 15 ms, bubble 20.0%", "time (ms)"):
        assert word in found
    assert {"rank 0", "rank 1", "F forward", "B backward", "idle"} <= set(found)


def test_measured_is_drawn_below_predicted_on_the_same_axis():
    shown = timeline()
    text = svg(shown, measured=shifted(timeline(message=0.5), 99.0))
    assert sum(bars(text).values()) == 2 * sum(map(len, shown.plan.programs))
    titles = [word for word in words(text) if word.endswith("1f1b, 2 ranks, 4 micro-batches")]
    assert [title.split(":")[0] for title in titles] == ["predicted", "measured"]
    left = [float(x) for x in re.findall(r'id="bars-\d-F-0">\s*<path d="M ?([\d.]+)', text)]
    assert left[0] == left[1]
    assert "time (units)" in words(text)


def test_memory_is_drawn_below_the_timeline_with_its_peak():
    found = words(svg(timeline(), memory=True, memory_unit="GB"))
    assert "memory (GB)" in found
    assert "peak 2" in found
    assert "memory (GB)" not in words(svg(timeline(), memory_unit="GB"))


def test_equal_timelines_give_equal_files_without_a_date():
    first, second = (svg(timeline("zb-v"), memory=True) for _ in range(2))
    assert first == second
    assert "date" not in first.lower()


def test_a_title_is_written_literally():
    title = 'a < b & $c$ "10.000" style="x"'
    assert title in words(svg(Panel(timeline(), title)))


def test_numbers_that_do_not_fit_are_left_out():
    found = words(svg(timeline("zb-v", 8, 128)))
    assert "127" not in found


def test_of_a_long_step_a_part_is_drawn_and_the_axis_says_which():
    """All 957 units of 64 ranks and 256 micro-batches are texture."""
    axes, *_ = draw_figure([Panel(timeline("1f1b", 64, 256))]).axes
    assert axes.get_xlim() == (0, 360)
    label = axes.get_xlabel()
    assert label == "time (units); drawn: the first 360 of 957; --format html shows all of it"
    assert all(bars.get_clip_on() for bars in axes.collections)
    (short,) = draw_figure([Panel(timeline("1f1b", 4, 8))]).axes
    assert short.get_xlabel() == "time (units)"


def test_steps_that_take_no_time_are_drawn():
    plan = hand_made("F0 F1 B0 B1")
    assert sum(bars(svg(simulate(plan, CostModel.uniform(1, 0, 0, 0)), memory=True)).values()) == 4


# PNG


@pytest.mark.parametrize(
    ("sizes", "least"),
    some_cases([(("1f1b", 2, 4), (1200, 200)), (("zb-v", 32, 64), (3000, 500))], 0),
)
def test_a_png_has_a_white_background_and_a_readable_size(sizes, least):
    with Image.open(io.BytesIO(png(timeline(*sizes), memory=True))) as image:
        assert least[0] <= image.width <= 3300
        assert least[1] <= image.height <= 3300
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_a_large_svg_embeds_its_bars_as_an_image():
    text = svg(timeline("1f1b", 32, 256))
    assert len(text) < 1_000_000
    assert "<image" in text


def test_without_matplotlib_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[pictures\]', or use html"):
        png(timeline())


def test_drawing_changes_no_setting_of_matplotlib():
    before = dict(matplotlib.rcParams)
    png(timeline())
    assert dict(matplotlib.rcParams) == before


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, pipemega.pipeline.visualize; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Chrome traces


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_trace_has_an_event_per_step_and_an_arrow_per_message(name):
    shown = timeline(name, 3, 4, message=0.5)
    written = json.loads(chrome_trace(shown, unit="ms"))
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
    crossings = sum(a != b for a, b in pairwise(shown.plan.rank_of_stage))
    assert len(by_phase["s"]) == len(by_phase["f"]) == 2 * 4 * crossings
    ends = {event["id"]: event for event in by_phase["f"]}
    for event in by_phase["s"]:
        assert event["ts"] <= ends[event["id"]]["ts"]
        assert event["pid"] != ends[event["id"]]["pid"]


def test_the_counters_of_a_trace_reach_the_peak_and_end_at_zero():
    shown = timeline("1f1b", 3, 6)
    for rank in range(3):
        counts = [
            event["args"]["held"]
            for event in json.loads(chrome_trace(shown))["traceEvents"]
            if event["ph"] == "C" and event["pid"] == rank
        ]
        assert (max(counts), counts[-1]) == (shown.peak[rank], 0)


def test_a_trace_names_its_processes_and_the_awaited_steps():
    events = json.loads(chrome_trace(timeline(), measured=timeline(), unit="s"))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named[0] == "predicted: 1f1b, 2 ranks, 4 micro-batches: rank 0"
    assert named[3] == "measured: 1f1b, 2 ranks, 4 micro-batches: rank 1"
    (first,) = [e for e in events if e["name"] == "F0@1" and e["pid"] == 3]
    assert first["ts"] == 1e6
    assert first["args"]["waited for"] == "F0@0"
    assert first["args"]["waited"] == 1


# Pictures of README and docs


def test_every_schedule_has_a_picture_for_light_and_dark_pages_in_the_docs():
    folder = docs_pictures.FOLDER
    pages = {folder.parent / "schedules.md": set(SCHEDULES)}
    pages[folder.parents[1] / "README.md"] = {docs_pictures.OVERVIEW}
    for page, expected in pages.items():
        shown = re.findall(
            r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)"><img\s'
            r'alt="[^"]+"\s+src="([^"]+)"></picture>',
            page.read_text(encoding="utf-8"),
        )
        files = [tuple(page.parent / path for path in pair) for pair in shown]
        assert {light.stem for _, light in files} == expected
        for dark, light in files:
            assert (dark, light) == tuple(
                docs_pictures.file_of(light.stem, d) for d in (True, False)
            )
            assert dark.is_file()
            assert light.is_file()
    named = {docs_pictures.file_of(n, d) for n in docs_pictures.NAMES for d in (True, False)}
    assert set(folder.iterdir()) == named


@pytest.mark.parametrize("name", docs_pictures.NAMES)
def test_the_pictures_of_the_docs_are_up_to_date(name):
    """Compare bars and texts only: positions may differ between versions of matplotlib."""
    drawn = docs_pictures.picture(name)
    for dark in (False, True):
        stored = docs_pictures.file_of(name, dark).read_text(encoding="utf-8")
        assert bars(stored) == bars(drawn)
        assert words(stored) == words(drawn)


def test_a_dark_picture_has_light_text_on_a_dark_background():
    light, dark = (svg(timeline(), memory=True, dark=dark) for dark in (False, True))
    for theme, other, text in ((LIGHT, DARK, light), (DARK, LIGHT, dark)):
        for colour in (theme.background, theme.text, theme.idle, theme.memory):
            assert colour in text
        assert other.background not in text
    with Image.open(io.BytesIO(png(timeline(), dark=True))) as image:
        assert image.convert("RGB").getpixel((2, 2)) == (13, 17, 23)


def test_a_mark_is_part_of_the_title_of_a_picture():
    panels = [Panel(timeline(), mark="recommended"), Panel(timeline("gpipe"))]
    assert "1f1b, 2 ranks, 4 micro-batches (recommended)" in words(svg(panels))
