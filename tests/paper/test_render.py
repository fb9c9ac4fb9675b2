"""Drawings in text."""

import re
from pathlib import Path

import pytest

from pipemega.pipeline import render
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.render import draw, table_of_schedules
from pipemega.pipeline.schedules import SCHEDULES, one_f_one_b
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.simulate import Timeline, simulate
from tests.paper.plans import hand_made

DOCS = Path(__file__).parents[2] / "docs"


def _drawn(plan, **options):
    return draw(simulate(plan, CostModel.uniform(plan.num_stages)), **options).splitlines()


def test_drawings_read_as_in_the_file_that_makes_them():
    rows = [line.strip() for line in render.__doc__.splitlines() if "    rank" in line]
    plan = one_f_one_b(3, 4)
    uneven = CostModel((2.1, 2.3), (1, 1), (1, 1), backward=(4.2, 3.9), message=0.15)
    to_scale = draw(simulate(one_f_one_b(2, 4), uneven), width=60).splitlines()
    assert rows == _drawn(plan)[:2] + _drawn(plan, width=50)[:2] + to_scale[:2]
    assert to_scale[2:] == ["(drawn to scale: 51 columns of 0.625)"]


def test_a_step_that_goes_on_is_drawn_as_long_as_it_takes():
    plan = hand_made("F0 I0 W0", "F0 B0")
    assert draw(simulate(plan, CostModel.uniform(2, 1, 2, 3))).splitlines() == [
        "rank 0   F0 .. .. .. .. .. .. I0 -- W0 -- --",
        "rank 1   .. F0 B0 -- -- -- -- .. .. .. .. ..",
    ]


def test_a_column_is_half_the_shortest_step_where_that_fits_all():
    plan = hand_made("F0 B0")
    assert (
        draw(simulate(plan, CostModel.uniform(1, 1.0, backward=1.5))) == "rank 0   F0 -- B0 -- --"
    )


def test_steps_of_a_second_stage_are_in_small_letters():
    plan = hand_made("F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1", rank_of_stage=v(2))
    costs = CostModel.uniform(4, backward=1.0)
    assert draw(simulate(plan, costs)).splitlines() == [
        "rank 0   F0 .. .. f0 b0 .. .. B0",
        "rank 1   .. F0 f0 .. .. b0 B0 ..",
    ]


def test_steps_of_more_stages_name_theirs():
    plan = hand_made("F0@0 F0@1 F0@3", "F0@2", rank_of_stage=(0, 0, 1, 0))
    assert _drawn(plan) == ["rank 0   F0@0 F0@1 .... F0@3", "rank 1   .... .... F0@2 ...."]


def test_steps_that_take_no_time_are_drawn_all_the_same():
    plan = hand_made("F0 F1 B0 B1")
    assert draw(simulate(plan, CostModel.uniform(1, 0, 0, 0))) == "rank 0   F0 F1 B0 B1"
    assert draw(simulate(plan, CostModel.uniform(1, 0, 1, 1))) == "rank 0   F0 F1 B0 B1"


def test_what_is_too_short_to_scale_is_a_letter_or_nothing():
    plan = hand_made("F0 F1 F2 B0 B1 B2")
    ends = [0.00111, 0.00312, 0.1003, 0.5077, 0.71, 1.0]
    timeline = Timeline(plan, ((0.0, *ends[:-1]),), (tuple(ends),), (3.0,))
    assert draw(timeline, width=29) == (
        "rank 0   F2B0------B1--B2----\n(drawn to scale: 20 columns of 0.05)"
    )
    assert draw(timeline, width=18).startswith("rank 0   FB0--BB2-\n")


def test_of_many_ranks_drawn_to_scale_the_first_are_shown():
    costs = CostModel.uniform(40, 1.0, backward=2.1)
    lines = draw(simulate(one_f_one_b(40, 4), costs), max_ranks=3).splitlines()
    assert len(lines) == 4
    assert all(len(line) <= 120 for line in lines)
    assert lines[-1].endswith("3 of 40 ranks)")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_what_is_too_wide_or_too_high_is_cut_and_says_so(width):
    lines = _drawn(one_f_one_b(40, 64), width=width, max_ranks=8)
    assert len(lines) == 9
    assert all(len(line) <= width for line in lines[:-1])
    drawn, columns, ranks, of = map(int, re.findall(r"\d+", lines[-1]))
    assert (columns, ranks, of) == (3 * (64 + 39), 8, 40)
    left, right = lines[0].removeprefix("rank 0").strip().split(" … ")
    assert len(left) + len(right) == drawn
    assert left.startswith("FFF")
    assert right.endswith("B-")


def test_the_table_of_schedules_names_each_with_its_formulas():
    rows = table_of_schedules().splitlines()[2:]
    assert len(rows) == len(SCHEDULES)
    for row, family in zip(rows, SCHEDULES.values(), strict=True):
        words = (family.name, family.makespan_formula, family.peak_formula, family.source)
        for word in words:
            assert word in row
    assert "| 27.3% |" in rows[list(SCHEDULES).index("1f1b")]  # 3 / (8 + 3)


def test_the_docs_show_this_table_and_these_drawings():
    text = (DOCS / "schedules.md").read_text()
    assert table_of_schedules() in text
    for family in SCHEDULES.values():
        plan = family.build(render.Sizes(4, 8, family.usual_chunks))
        costs = CostModel.uniform(plan.num_stages, backward=1.0)
        assert f"```\n{draw(simulate(plan, costs))}\n```" in text
