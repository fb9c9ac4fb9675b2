"""The page of timelines, in a browser: what it shows, to whom points, taps, zooms or uses keys."""

import json
import re

import pytest

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.pictures import Panel, Table, html
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.simulate import simulate
from tests.paper.chromium import BROWSER, NAMES, browser

needs_a_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)
BAD = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


def timeline(name="1f1b", pp_size=2, num_microbatches=4, message=0.0):
    plan = build_plan(name, pp_size, num_microbatches)
    return simulate(plan, CostModel.shared(plan.rank_of_stage, message=message))


def cells(page):
    return re.findall(r"<td[^>]*>([^<]*)</td>", page)


# What is written into the page


def test_the_page_has_the_figures_and_the_peak_of_each_rank():
    page = html(timeline(), unit="ms", memory_unit="GB")
    assert cells(page)[:5] == ["1f1b", "15", "15", "20.0%", "2"]
    assert cells(page)[5:] == ["0", "0", "12", "20.0%", "2", "1", "1", "12", "20.0%", "1"]
    for word in ("makespan, ms", "held, GB", "holds at most, GB"):
        assert f">{word}<" in page


def test_tables_that_are_given_stand_above_those_of_the_timelines():
    table = Table("Which fit", ("schedule", "GB"), (("mine", "80"), ("yours", "79 GB")))
    page = html(timeline(), title="A plan", tables=[table])
    assert "<title>A plan</title>" in page
    assert page.index("Which fit") < page.index("makespan, units") < page.index("<main")
    assert "<td>mine</td><td class=n>80</td>" in page


def test_a_table_may_have_no_rows():
    assert "<th>schedule</th>" in html(timeline(), tables=[Table("", ("schedule",), ())])


def test_names_cannot_break_out_of_the_page():
    page = html(Panel(timeline(), BAD), tables=[Table(BAD, (BAD,), [(BAD,)])], unit=BAD)
    assert page.count("</script>") == html(timeline()).count("</script>") == 2
    assert "<img" not in page
    written = re.search(r'application/json">(.*?)</script>', page, re.S)[1]
    assert json.loads(written)["panels"][0]["title"] == BAD


def test_panels_whose_first_words_agree_are_called_by_their_whole_title():
    panels = [Panel(timeline(), f"mine, {size}") for size in ("small", "large")]
    assert cells(html(panels))[::5][:2] == ["mine, small", "mine, large"]


def test_the_page_asks_for_nothing_from_elsewhere():
    page = html(timeline())
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+", page) == []
    assert "default-src 'none'" in page


# What it does


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def show(page, tmp_path):
    """Opens a page; afterwards nothing may have been complained of, or asked of the network."""

    def show(text, **options):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        page.open(tmp_path / "page.html", **options)
        return page

    page.complaints.clear()
    yield show
    assert page.complaints == []


def place(page, moment, rank, panel=0):
    """Where on the screen a rank is at a moment."""
    view = page.ask(
        f"(() => {{ const c = document.querySelectorAll('canvas')[{panel}];"
        " c.scrollIntoView({block: 'center'}); const r = c.getBoundingClientRect();"
        " return {x: r.x, y: r.y, ...c.dataset}; })()"
    )
    view = {key: float(value) for key, value in view.items()}
    part = (moment - view["from"]) / (view["to"] - view["from"])
    x = view["x"] + view["left"] + part * view["plot"]
    return x, view["y"] + (rank + 0.3) * view["row"]


def window(page):
    return page.ask(
        "(() => { const d = document.querySelector('canvas').dataset; return [+d.from, +d.to]; })()"
    )


def detail(page):
    if page.ask("document.getElementById('detail').hidden"):
        return None
    return page.ask("document.getElementById('detail').innerText").replace("\n", " ")


@needs_a_browser
def test_who_points_at_a_step_reads_what_it_is_and_what_it_waited_for(show):
    page = show(html(timeline(), unit="ms"))
    page.mouse("mouseMoved", *place(page, 5, 0))  # B0@0 from 4 to 6, after B0@1
    assert detail(page) == (
        "backward of micro-batch 0 stage 0 rank 0 time 4 to 6 ms (2) "
        "waited 2 ms for B0 at stage 1, rank 1 holds 2 micro-batches, then 1"
    )
    page.mouse("mouseMoved", *place(page, 3, 0))
    assert detail(page) == (
        "rank 0 waits waits 2 ms for B0 at stage 1, rank 1 before backward of micro-batch 0"
    )
    page.mouse("mouseMoved", 5, 5)
    assert detail(page) is None


@needs_a_browser
def test_the_same_step_is_read_from_predicted_and_measured(show):
    page = show(html(timeline(), measured=timeline(message=0.5)))
    page.mouse("mouseMoved", *place(page, 2, 1, panel=1))
    assert detail(page).startswith("forward of micro-batch 0 stage 1 rank 1 time 1.5 to 2.5 units")
    assert detail(page).endswith("predicted 1 to 2 units (1)")


@needs_a_browser
def test_buttons_wheel_and_drag_change_what_is_seen_of_all_timelines(show):
    page = show(html([Panel(timeline()), Panel(timeline("gpipe"))]))
    assert window(page) == [0, 15]
    page.ask("document.getElementById('in').click()")
    page.settle()
    left, right = window(page)
    assert right - left == pytest.approx(15 / 1.6)
    assert (left + right) / 2 == pytest.approx(7.5)
    x, y = place(page, 6, 0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)  # with Ctrl
    assert place(page, 6, 0)[0] == pytest.approx(x, abs=1)
    left, right = window(page)
    assert right - left < 15 / 1.6 / 1.5
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert window(page)[0] > left
    assert page.ask(
        "new Set([...document.querySelectorAll('canvas')].map(c => c.dataset.from)).size === 1"
    )
    page.ask("document.getElementById('whole').click()")
    page.settle()
    assert window(page) == [0, 15]


@needs_a_browser
def test_a_wheel_scrolls_the_page_until_a_timeline_has_been_clicked(show):
    page = show(html(timeline()))
    x, y = place(page, 5, 0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert window(page) == [0, 15]
    for what in ("mousePressed", "mouseReleased"):
        page.mouse(what, x, y, button="left", clickCount=1)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert window(page)[1] < 15
    page.mouse("mouseMoved", *place(page, 12, 1))
    assert detail(page).startswith("backward of micro-batch 0"), "the one that was clicked stays"


@needs_a_browser
def test_keys_go_from_step_to_step_and_zoom(show):
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
        assert detail(page).startswith(words)
    page.key("+")
    assert window(page)[1] < 15
    page.key("0")
    assert window(page) == [0, 15]
    page.key("Escape")
    assert detail(page) is None


@needs_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_a_tap_tells(show, dark):
    table = Table("Plans", ("what", *"abcdefghij"), [("x" * 40, *["1234567"] * 10)])
    text = html(timeline("zb-v", 8, 32), measured=timeline("zb-v", 8, 32), tables=[table])
    page = show(text, width=360, height=740, dark=dark)
    assert page.ask("document.documentElement.scrollWidth") == 360
    x, y = place(page, 0.5, 0)
    page.tap(x + 2, y)
    assert detail(page).startswith("forward of micro-batch ")
    box = page.ask("document.getElementById('detail').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= 360
    row = page.ask("document.querySelector('canvas').getBoundingClientRect().y")
    assert row + 20 < box["top"], "what is told does not lie over what it tells of"
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 21, 26)" if dark else "rgb(255, 255, 255)")


@needs_a_browser
def test_two_fingers_zoom(show):
    page = show(html(timeline()), width=360, height=740)
    x, y = place(page, 7.5, 0)
    for what, apart in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80)):
        fingers = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        page.call("Input.dispatchTouchEvent", type=what, touchPoints=fingers)
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.settle()
    left, right = window(page)
    assert right - left == pytest.approx(15 / 4, rel=0.05)


@needs_a_browser
def test_a_box_hides_its_timeline_and_memory_makes_rows_higher(show):
    page = show(html([Panel(timeline()), Panel(timeline("gpipe"))]))
    before = page.ask("document.querySelector('canvas').clientHeight")
    boxes = page.ask("[...document.querySelectorAll('#shown label')].map(l => l.innerText)")
    assert boxes == ["1f1b", "gpipe", "memory"]
    page.ask("document.querySelectorAll('#shown input')[1].click()")
    page.ask("document.querySelectorAll('#shown input')[2].click()")
    page.settle()
    assert page.ask("[...document.querySelectorAll('section')].map(s => s.hidden)") == [False, True]
    assert page.ask("document.querySelector('canvas').clientHeight") > before


@needs_a_browser
def test_a_name_that_is_a_script_is_only_read(show):
    page = show(html(Panel(timeline(), BAD), tables=[Table(BAD, (BAD,), [(BAD,)])], unit=BAD))
    assert page.ask("document.querySelector('h2').innerText") == BAD
    page.mouse("mouseMoved", *place(page, 5, 0))
    assert BAD in detail(page)


@needs_a_browser
def test_64_ranks_of_512_microbatches_are_drawn_and_pointed_at(show, tmp_path):
    page = show(html(timeline("1f1b", 64, 512)))
    page.mouse("mouseMoved", *place(page, 800, 40))
    assert "rank 40" in detail(page)
    page.photograph(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
