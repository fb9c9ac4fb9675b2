"""The HTML page of timelines: its content, and its behaviour in a browser."""

import json
import re

import pytest

from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.visualize import Bars, Intro, Panel, Table, Verdict, html
from tests.paper.visualize.chromium import BROWSER, NAMES, browser

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)
BAD = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'
BAD_INTRO = Intro(
    BAD,
    Verdict(True, BAD, [(BAD, BAD)], [(BAD, BAD)]),
    Bars(BAD, BAD, (BAD,), [(BAD, (1.0,))], 0.5, BAD),
    [Table(BAD, (BAD,), [(BAD,)])],
    [Table(BAD, (BAD,), [(BAD,)])],
)
INTRO = Intro(
    "plan",
    Verdict(
        False,
        "Does not fit: needs 9.00 GB of 8.00 GB",
        [("time per step", "3.56 s"), ("bubble", "10.2%")],
        [("to make it fit:", "--set model.recompute=full (7.20 GB)")],
    ),
    Bars(
        "memory",
        "GB",
        ("weights", "activations"),
        [("rank 0", (3.0, 6.0)), ("rank 1", (3.0, 1.0))],
        8.0,
        "device",
    ),
    [Table("Plans", ("what", *"abcdefghij"), [("x" * 40, *["1234567"] * 10)], [0])],
)


def timeline(name="1f1b", pp_size=2, num_microbatches=4, message=0.0):
    plan = build_plan(name, pp_size, num_microbatches)
    return simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage, message=message))


def cells(page):
    return re.findall(r"<td[^>]*>([^<]*)</td>", page)


# Content


def test_the_page_has_makespan_bubble_and_the_peak_of_each_rank():
    page = html(timeline(), unit="ms", memory_unit="GB")
    assert cells(page)[:5] == ["1f1b", "15", "15", "20.0%", "2"]
    assert cells(page)[5:] == ["0", "0", "12", "20.0%", "2", "1", "1", "12", "20.0%", "1"]
    for word in ("makespan, ms", "peak memory, GB", "busy, ms"):
        assert f">{word}<" in page


def test_given_tables_are_above_those_of_the_timelines():
    table = Table("Which fit", ("schedule", "GB"), (("mine", "80"), ("yours", "79 GB")))
    page = html(timeline(), intro=Intro("A plan", tables=[table]))
    assert "<title>A plan</title>" in page
    assert page.index("Which fit") < page.index("makespan, units") < page.index("<main")
    assert "<td>mine</td><td class=n>80</td>" in page


def test_a_table_may_have_no_rows():
    assert "<th>schedule</th>" in html(
        timeline(), intro=Intro(tables=[Table("", ("schedule",), ())])
    )


def test_the_verdict_and_the_memory_bars_come_first():
    page = html(timeline(), intro=INTRO)
    assert '<div id="verdict" class="bad"><p>✗ Does not fit: needs 9.00 GB of 8.00 GB</p>' in page
    assert "<dt>time per step</dt><dd>3.56 s</dd>" in page
    order = [
        "Does not fit",
        "to make it fit:",
        "rank 1</th>",
        "<td>" + "x" * 40,
        "<main",
        "<details",
    ]
    assert sorted(order, key=page.index) == order
    assert page.index("makespan, units") > page.index("<details"), "the verdict has these numbers"


def test_a_bar_is_drawn_to_scale_and_hatched_above_the_limit():
    page = html(timeline(), intro=INTRO)
    first, second = re.findall(r'<td class="track">(.*?)</td>', page)
    widths = [re.findall(r"left:([\d.]+)%;width:([\d.]+)%", bar) for bar in (first, second)]
    assert widths[0] == [("0.00", "33.33"), ("33.33", "66.67"), ("88.89", "11.11")]
    assert widths[1] == [("0.00", "33.33"), ("33.33", "11.11")]
    assert first.count('class="over"') == 1
    assert 'class="limit" style="left:88.89%"' in second
    assert 'title="activations: 6.00 GB"' in first
    assert "<td class=n>9.00 GB</td>" in page


def test_the_row_and_the_timeline_of_the_chosen_schedule_are_marked():
    panels = [Panel(timeline(), mark="in the config"), Panel(timeline("gpipe"))]
    page = html(panels)
    assert page.count("<tr class=marked>") == 1
    assert re.search(r"<tr class=marked><td>1f1b</td>", page)
    assert [panel["mark"] for panel in written_data(page)["panels"]] == ["in the config", ""]


def test_of_many_timelines_only_those_with_a_mark_are_shown_at_first():
    marks = [None, "recommended", None, None, None]
    panels = [Panel(timeline(), str(n), mark=mark) for n, mark in enumerate(marks)]
    visible = [panel["visible"] for panel in written_data(html(panels))["panels"]]
    assert visible == [False, True, False, False, False]
    assert all(panel["visible"] for panel in written_data(html(panels[:4]))["panels"])


def written_data(page):
    return json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])


def test_titles_are_escaped():
    page = html(Panel(timeline(), BAD), intro=BAD_INTRO, unit=BAD)
    assert page.count("</script>") == html(timeline()).count("</script>") == 2
    assert "<img" not in page
    assert written_data(page)["panels"][0]["title"] == BAD


def test_panels_with_equal_first_words_are_named_by_their_whole_title():
    panels = [Panel(timeline(), f"mine, {size}") for size in ("small", "large")]
    assert cells(html(panels))[::5][:2] == ["mine, small", "mine, large"]


def test_the_page_loads_nothing_from_the_network():
    page = html(timeline())
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+", page) == []
    assert "default-src 'none'" in page


# Behaviour in a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def show(page, tmp_path):
    """Open a page; after the test, no error may be logged and no network request made."""

    def show(text, **options):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        page.open(tmp_path / "page.html", **options)
        return page

    page.problems.clear()
    yield show
    assert page.problems == []


def position(page, time, rank, panel=0):
    """Return the screen position of a rank at a time."""
    view = page.ask(
        f"(() => {{ const c = document.querySelectorAll('canvas')[{panel}];"
        " c.scrollIntoView({block: 'center'}); const r = c.getBoundingClientRect();"
        " return {x: r.x, y: r.y, ...c.dataset}; })()"
    )
    view = {key: float(value) for key, value in view.items()}
    part = (time - view["from"]) / (view["to"] - view["from"])
    x = view["x"] + view["left"] + part * view["plot"]
    return x, view["y"] + (rank + 0.3) * view["row"]


def visible_times(page):
    return page.ask(
        "(() => { const d = document.querySelector('canvas').dataset; return [+d.from, +d.to]; })()"
    )


def shown_details(page):
    if page.ask("document.getElementById('detail').hidden"):
        return None
    return page.ask("document.getElementById('detail').innerText").replace("\n", " ")


@needs_browser
def test_pointing_at_a_step_shows_its_details_and_its_wait(show):
    page = show(html(timeline(), unit="ms"))
    page.mouse("mouseMoved", *position(page, 5, 0))  # B0@0 from 4 to 6, after B0@1
    assert shown_details(page) == (
        "backward of micro-batch 0 stage 0 rank 0 time 4 to 6 ms (2) "
        "waited 2 ms for B0 of stage 1, rank 1 memory 2 micro-batches, then 1"
    )
    page.mouse("mouseMoved", *position(page, 3, 0))
    assert shown_details(page) == (
        "rank 0 is idle waits 2 ms for B0 of stage 1, rank 1 before backward of micro-batch 0"
    )
    page.mouse("mouseMoved", 5, 5)
    assert shown_details(page) is None


@needs_browser
def test_details_show_the_times_of_the_step_in_predicted_and_measured(show):
    page = show(html(timeline(), measured=timeline(message=0.5)))
    page.mouse("mouseMoved", *position(page, 2, 1, panel=1))
    assert shown_details(page).startswith(
        "forward of micro-batch 0 stage 1 rank 1 time 1.5 to 2.5 units"
    )
    assert shown_details(page).endswith("predicted 1 to 2 units (1)")


@needs_browser
def test_buttons_wheel_and_drag_change_the_view_of_all_timelines(show):
    page = show(html([Panel(timeline()), Panel(timeline("gpipe"))]))
    assert visible_times(page) == [0, 15]
    page.ask("document.getElementById('in').click()")
    page.settle()
    left, right = visible_times(page)
    assert right - left == pytest.approx(15 / 1.6)
    assert (left + right) / 2 == pytest.approx(7.5)
    x, y = position(page, 6, 0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)  # with Ctrl
    assert position(page, 6, 0)[0] == pytest.approx(x, abs=1)
    left, right = visible_times(page)
    assert right - left < 15 / 1.6 / 1.5
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert visible_times(page)[0] > left
    assert page.ask(
        "new Set([...document.querySelectorAll('canvas')].map(c => c.dataset.from)).size === 1"
    )
    page.ask("document.getElementById('all').click()")
    page.settle()
    assert visible_times(page) == [0, 15]


@needs_browser
def test_buttons_zoom_to_warm_up_steady_phase_and_cool_down_of_128_microbatches(show):
    """Of a whole step with 128 micro-batches, a bar is narrower than its number."""
    longer = timeline("1f1b", 4, 128, message=0.5)
    page = show(html(timeline("1f1b", 4, 128), measured=longer))
    whole = timeline("1f1b", 4, 128).makespan
    assert phase_button(page, "all") == ([0, longer.makespan], "true")
    # Rank 0 begins its first backward at time 10 and ends its last forward at time 383.
    assert phase_button(page, "warm") == ([0, pytest.approx(11.5)], "true")
    (left, right), _ = phase_button(page, "steady")
    assert right - left == pytest.approx(11.5)
    assert 10 < left < right < whole - 10
    (left, right), _ = phase_button(page, "cool")
    assert right == pytest.approx(whole)
    assert right - left < 20
    measured = page.ask("document.querySelectorAll('canvas')[1].dataset.to")
    assert float(measured) == pytest.approx(longer.makespan), "the ends of both are aligned"
    assert phase_button(page, "all")[0] == [0, longer.makespan]
    assert page.ask("document.getElementById('range').textContent").startswith("0 to ")


def phase_button(page, name):
    page.ask(f"document.getElementById('{name}').focus()")
    page.key("Enter")
    pressed = page.ask(f"document.getElementById('{name}').ariaPressed")
    return visible_times(page), pressed


@needs_browser
def test_keys_zoom_to_the_phases_and_gpipe_has_no_steady_phase(show):
    page = show(html(timeline("gpipe", 2, 4)))
    assert page.ask("document.getElementById('steady').disabled")
    page.ask("document.querySelector('canvas').focus()")
    page.key("s")
    assert visible_times(page) == [0, 15]
    page.key("c")
    assert visible_times(page)[0] > 0
    page.key("0")
    assert visible_times(page) == [0, 15]


@needs_browser
def test_the_unit_of_the_axis_leaves_space_for_its_first_number(show):
    """The words "mean forwards" covered the zero."""
    page = show(html(timeline(), unit="mean forwards"))
    canvas = "document.querySelector('canvas')"
    width = page.ask(f"{canvas}.getContext('2d').measureText('mean forwards').width")
    assert float(page.ask(f"{canvas}.dataset.left")) > width + 4


@needs_browser
def test_the_legend_names_the_letters_of_the_kinds(show):
    page = show(html(timeline("zb-h1")))
    legend = page.ask("document.getElementById('legend').innerText").split("\n")
    assert [*filter(None, legend)] == ["F forward", "I input gradient", "W weight gradient", "idle"]
    assert "B backward" in show(html(timeline())).ask("document.getElementById('legend').innerText")


@needs_browser
def test_the_wheel_scrolls_the_page_until_a_timeline_is_clicked(show):
    page = show(html(timeline()))
    x, y = position(page, 5, 0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert visible_times(page) == [0, 15]
    for what in ("mousePressed", "mouseReleased"):
        page.mouse(what, x, y, button="left", clickCount=1)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert visible_times(page)[1] < 15
    page.mouse("mouseMoved", *position(page, 12, 1))
    assert shown_details(page).startswith("backward of micro-batch 0"), (
        "the clicked step stays selected"
    )


@needs_browser
def test_keys_select_steps_and_zoom(show):
    page = show(html(timeline()))
    page.ask("document.querySelector('canvas').focus()")
    for key, words in (
        ("ArrowRight", "forward of micro-batch 0 stage 0"),
        ("ArrowRight", "forward of micro-batch 1 stage 0"),
        ("ArrowDown", "forward of micro-batch 0 stage 1"),
        ("ArrowRight", "backward of micro-batch 0 stage 1"),
        ("ArrowUp", "backward of micro-batch 0 stage 0"),
        ("ArrowLeft", "forward of micro-batch 1 stage 0"),
    ):
        page.key(key)
        assert shown_details(page).startswith(words)
    page.key("+")
    assert visible_times(page)[1] < 15
    page.key("0")
    assert visible_times(page) == [0, 15]
    page.key("Escape")
    assert shown_details(page) is None


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_the_page_fits_the_screen_and_a_tap_shows_details(show, dark):
    text = html(timeline("zb-v", 8, 32), measured=timeline("zb-v", 8, 32), intro=INTRO)
    page = show(text, width=360, height=740, dark=dark)
    assert page.ask("document.documentElement.scrollWidth") == 360
    x, y = position(page, 0.5, 0)
    page.tap(x + 2, y)
    assert shown_details(page).startswith("forward of micro-batch ")
    box = page.ask("document.getElementById('detail').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= 360
    row = page.ask("document.querySelector('canvas').getBoundingClientRect().y")
    assert row + 20 < box["top"], "the details do not cover the step"
    background = page.ask("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


@needs_browser
def test_a_pinch_zooms(show):
    page = show(html(timeline()), width=360, height=740)
    x, y = position(page, 7.5, 0)
    for what, apart in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80)):
        fingers = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        page.call("Input.dispatchTouchEvent", type=what, touchPoints=fingers)
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.settle()
    left, right = visible_times(page)
    assert right - left == pytest.approx(15 / 4, rel=0.05)


@needs_browser
def test_a_checkbox_hides_its_timeline_and_memory_makes_rows_higher(show):
    page = show(html([Panel(timeline()), Panel(timeline("gpipe"))]))
    before = page.ask("document.querySelector('canvas').clientHeight")
    boxes = page.ask("[...document.querySelectorAll('#shown label')].map(l => l.innerText)")
    assert boxes == ["1f1b", "gpipe", "memory"]
    page.ask("document.querySelectorAll('#shown input')[1].click()")
    page.ask("document.querySelectorAll('#shown input')[2].click()")
    page.settle()
    assert page.ask("[...document.querySelectorAll('section')].map(s => s.hidden)") == [False, True]
    assert page.ask("document.querySelector('canvas').clientHeight") > before


@needs_browser
def test_a_title_with_a_script_is_shown_as_text(show):
    page = show(html(Panel(timeline(), BAD), intro=BAD_INTRO, unit=BAD))
    assert page.ask("document.querySelector('h2').innerText") == BAD
    page.mouse("mouseMoved", *position(page, 5, 0))
    assert BAD in shown_details(page)


@needs_browser
def test_64_ranks_of_512_microbatches_are_drawn_and_selectable(show, tmp_path):
    """The page opens on some steps of the steady phase: the whole step would be texture."""
    whole = timeline("1f1b", 64, 512)
    page = show(html(whole, unit="mean forwards"))
    left, right = visible_times(page)
    assert whole.makespan / 4 < left < right < whole.makespan * 3 / 4
    assert page.ask("document.getElementById('steady').ariaPressed") == "true"
    page.mouse("mouseMoved", *position(page, (left + right) / 2, 40))
    assert "rank 40" in shown_details(page)
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
