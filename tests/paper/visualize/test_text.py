"""Timelines as text."""

import re

import pytest

from pipemega.pipeline.plan.simulate import CostModel, Timeline, simulate
from pipemega.pipeline.schedules.building_blocks import v
from pipemega.pipeline.schedules.one_f_one_b import one_f_one_b
from pipemega.pipeline.visualize import text as text_module
from pipemega.pipeline.visualize.text import draw_text
from tests.paper.hand_made_plans import hand_made


def _drawn(plan, **options):
    return draw_text(simulate(plan, CostModel.uniform(plan.num_stages)), **options).splitlines()


def test_timelines_are_drawn_as_in_the_docstring_of_the_module():
    rows = [line.strip() for line in text_module.__doc__.splitlines() if "    rank" in line]
    plan = one_f_one_b(3, 4)
    uneven = CostModel((2.1, 2.3), (1, 1), (1, 1), backward=(4.2, 3.9), message=0.15)
    to_scale = draw_text(simulate(one_f_one_b(2, 4), uneven), width=60).splitlines()
    assert rows == _drawn(plan)[:2] + _drawn(plan, width=50)[:2] + to_scale[:2]
    assert to_scale[2:] == ["(drawn to scale: 51 columns of 0.625)"]


def test_a_step_fills_one_column_per_unit_of_its_time():
    plan = hand_made("F0 I0 W0", "F0 B0")
    assert draw_text(simulate(plan, CostModel.uniform(2, 1, 2, 3))).splitlines() == [
        "rank 0   F0 .. .. .. .. .. .. I0 -- W0 -- --",
        "rank 1   .. F0 B0 -- -- -- -- .. .. .. .. ..",
    ]


def test_a_column_is_half_the_shortest_step_if_all_times_are_multiples_of_it():
    plan = hand_made("F0 B0")
    assert (
        draw_text(simulate(plan, CostModel.uniform(1, 1.0, backward=1.5)))
        == "rank 0   F0 -- B0 -- --"
    )


def test_steps_of_a_second_stage_are_in_lower_case():
    plan = hand_made("F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1", rank_of_stage=v(2))
    costs = CostModel.uniform(4, backward=1.0)
    assert draw_text(simulate(plan, costs)).splitlines() == [
        "rank 0   F0 .. .. f0 b0 .. .. B0",
        "rank 1   .. F0 f0 .. .. b0 B0 ..",
    ]


def test_steps_of_more_than_two_stages_name_their_stage():
    plan = hand_made("F0@0 F0@1 F0@3", "F0@2", rank_of_stage=(0, 0, 1, 0))
    assert _drawn(plan) == ["rank 0   F0@0 F0@1 .... F0@3", "rank 1   .... .... F0@2 ...."]


def test_steps_that_take_no_time_get_a_column():
    plan = hand_made("F0 F1 B0 B1")
    assert draw_text(simulate(plan, CostModel.uniform(1, 0, 0, 0))) == "rank 0   F0 F1 B0 B1"
    assert draw_text(simulate(plan, CostModel.uniform(1, 0, 1, 1))) == "rank 0   F0 F1 B0 B1"


def test_drawn_to_scale_short_steps_are_one_letter_or_missing():
    plan = hand_made("F0 F1 F2 B0 B1 B2")
    ends = [0.00111, 0.00312, 0.1003, 0.5077, 0.71, 1.0]
    timeline = Timeline(plan, ((0.0, *ends[:-1]),), (tuple(ends),), (3.0,))
    assert draw_text(timeline, width=29) == (
        "rank 0   F2B0------B1--B2----\n(drawn to scale: 20 columns of 0.05)"
    )
    assert draw_text(timeline, width=18).startswith("rank 0   FB0--BB2-\n")


def test_drawn_to_scale_only_the_first_of_many_ranks_are_shown():
    costs = CostModel.uniform(40, 1.0, backward=2.1)
    lines = draw_text(simulate(one_f_one_b(40, 4), costs), max_ranks=3).splitlines()
    assert len(lines) == 4
    assert all(len(line) <= 120 for line in lines)
    assert lines[-1].endswith("3 of 40 ranks)")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_timeline_that_is_too_wide_or_too_high_is_cut_and_the_last_line_says_so(width):
    lines = _drawn(one_f_one_b(40, 64), width=width, max_ranks=8)
    assert len(lines) == 9
    assert all(len(line) <= width for line in lines[:-1])
    drawn, columns, ranks, all_ranks = map(int, re.findall(r"\d+", lines[-1]))
    assert (columns, ranks, all_ranks) == (3 * (64 + 39), 8, 40)
    left, right = lines[0].removeprefix("rank 0").strip().split(" … ")
    assert len(left) + len(right) == drawn
    assert left.startswith("FFF")
    assert right.endswith("B-")
