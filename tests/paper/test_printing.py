"""Percentages, tables, colour and lines that fit the terminal."""

import io
import re
from pathlib import Path

import pytest

from pipemega import printing
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import SCHEDULES, RankCosts, Sizes
from pipemega.printing import aligned, coloured, line_width, percent, wrapped
from tests.paper.hand_made_plans import hand_made

VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "TERM", "COLUMNS")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_table_has_its_first_columns_at_the_left_and_its_numbers_at_the_right():
    rows = [("stage", "kind", "ms"), ("0", "F", "12.5"), ("10", "", "3")]
    assert aligned(rows, left=2).splitlines() == [
        "stage  kind    ms",
        "0      F     12.5",
        "10              3",
    ]


# Percentages


@pytest.mark.parametrize(
    ("fraction", "options", "text"),
    [
        (0.1024, {}, "10.2%"),
        (-1e-17, {}, "0.0%"),
        (-0.0004, {}, "0.0%"),
        (-0.0006, {}, "-0.1%"),
        (-0.004, {"decimals": 0, "signed": True}, "+0%"),
        (0.05, {"decimals": 2, "signed": True}, "+5.00%"),
        (float("nan"), {}, "nan%"),
    ],
)
def test_a_percentage_that_rounds_to_zero_has_no_minus_sign(fraction, options, text):
    assert percent(fraction, **options) == text


def test_only_the_function_percent_formats_percentages():
    """A format such as :.1% prints -0.0% for a bubble of -1e-17."""
    package = Path(printing.__file__).parent
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    assert [str(path) for path, text in texts.items() if re.search(r":[^{}\"]*%\}", text)] == []


def test_a_bubble_is_never_negative():
    """The rounding of sums of start and end times made the bubble of one rank -2e-16."""
    plan = hand_made(" ".join(f"F{i} B{i}" for i in range(7)))
    times = [i / 10 for i in range(1, 30)]
    for time in times:
        assert simulate(plan, CostModel.uniform(1, time, time / 3)).bubble >= 0
    for family in SCHEDULES.values():
        sizes = Sizes(1, 7, family.default_chunks)
        assert all(family.bubble(sizes, RankCosts(t, t / 3, t / 7)) >= 0 for t in times)


# Width


def test_only_a_terminal_limits_the_width_of_lines(environment):
    environment.setenv("COLUMNS", "70")
    assert line_width(Terminal(), 120) == 70
    assert line_width(io.StringIO(), 120) == 120


def test_wrapped_lines_continue_below_the_first_word_of_the_text():
    text = "makespan   twelve units (formula: m)\nrank 0 F0"
    assert wrapped(text, 24).splitlines() == [
        "makespan   twelve units",
        "           (formula: m)",
        "rank 0 F0",
    ]


def test_a_line_without_label_is_indented():
    assert wrapped("all ranks wait for it", 12) == "all ranks\n    wait for\n    it"


# Colour


def test_warnings_and_errors_have_a_colour_on_a_terminal():
    assert coloured("WARNING:", "WARNING", Terminal()) == "\033[1;33mWARNING:\033[0m"
    assert coloured("error:", "ERROR", Terminal()) == "\033[1;31merror:\033[0m"
    assert coloured("INFO:", "INFO", Terminal()) == "INFO:"
    assert coloured("error:", "ERROR", io.StringIO()) == "error:"


@pytest.mark.parametrize(
    ("stream", "variables", "colour"),
    [
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"CLICOLOR": "0"}, False),
        (Terminal, {"CLICOLOR": "0", "CLICOLOR_FORCE": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"CLICOLOR_FORCE": "0"}, False),
        (io.StringIO, {"CLICOLOR": "1"}, False),
    ],
)
def test_the_environment_decides_about_colour(stream, variables, colour, environment):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert printing.uses_colour(stream()) == colour
