"""Tests of the simulation: start times, idle times, memory, speed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules.building_blocks import loop, v
from pipemega.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.paper.hand_made_plans import hand_made, valid_plans


@settings(max_examples=100)
@given(valid_plans(), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 2))
def test_each_step_starts_as_early_as_its_rank_and_its_input_allow(plan, f, i, w, message):
    costs = CostModel.uniform(plan.num_stages, f, i, w, message=message)
    timeline = simulate(lower(plan), costs)
    assert timeline.plan == plan
    took = {Kind.FORWARD: f, Kind.BACKWARD_INPUT: i, Kind.BACKWARD_WEIGHT: w, Kind.BACKWARD: i + w}
    ends = {s: end for rank in range(plan.num_ranks) for s, _, end in timeline.steps(rank)}
    for rank in range(plan.num_ranks):
        free = 0.0
        for step, start, end in timeline.steps(rank):
            assert end == pytest.approx(start + took[step.kind])
            need, ready = plan.needs(step), 0.0
            if need is not None:
                far = plan.rank_of_stage[need.stage] != rank
                ready = ends[need] + (message if far else 0.0)
            assert start == max(free, ready)
            free = end


def test_times_and_bubble_of_a_small_plan():
    timeline = simulate(hand_made("F0 B0", "F0 B0"), CostModel.uniform(2, 1, 1, 2, message=0.5))
    assert timeline.start == ((0.0, 6.0), (1.5, 2.5))
    assert timeline.end == ((1.0, 9.0), (2.5, 5.5))
    assert (timeline.makespan, timeline.span) == (9.0, 9.0)
    assert timeline.waits(0) == [(Instruction.parse("B0@0"), 5.0)]
    assert timeline.waits(1) == [(Instruction.parse("F0@1"), 1.5)]
    assert timeline.bubble_of(0) == pytest.approx(5 / 9)
    assert timeline.bubble == pytest.approx((5 / 9 + 5 / 9) / 2)


def test_span_is_the_longest_time_of_one_rank_and_makespan_of_all():
    # Each rank runs one step without idle time, but rank 1 starts when rank 0 has finished.
    timeline = simulate(hand_made("F0", "F0"), CostModel.uniform(2))
    assert (timeline.makespan, timeline.span) == (2.0, 1.0)


def test_stages_on_one_rank_need_no_message():
    plan = hand_made("F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1", rank_of_stage=v(2))
    assert simulate(plan, CostModel.uniform(4, message=10.0)).makespan == 4 * 3 + 4 * 10


def test_memory_counts_from_f_to_the_end_of_w_or_b():
    costs = CostModel.uniform(1)
    assert simulate(hand_made("F0 I0 F1 I1 W0 W1"), costs).peak == (2.0,)
    assert simulate(hand_made("F0 I0 W0 F1 I1 W1"), costs).peak == (1.0,)
    assert simulate(hand_made("F0 B0 F1 B1"), costs).peak == (1.0,)


def test_memory_between_i_and_w_may_be_lower_or_higher_than_before():
    plan = hand_made("F0 I0 F1 I1 W0 W1")
    assert simulate(plan, CostModel.uniform(1, kept=0.25)).peak == (1.25,)
    # With activation checkpointing F leaves little, and I makes the rest anew.
    assert simulate(plan, CostModel.uniform(1, kept=13.0)).peak == (26.0,)


def test_memory_is_counted_by_stage():
    plan = hand_made("F0@0 F0@1 B0@1 B0@0", rank_of_stage=(0, 0))
    costs = CostModel((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), activation=(3.0, 5.0))
    assert simulate(plan, costs).peak == (8.0,)


def test_rank_costs_are_divided_among_its_stages():
    costs = CostModel.from_rank_costs((0, 1, 1, 0, 1), 6.0, 3.0, 12.0, 0.5)
    assert costs.forward == pytest.approx((3.0, 2.0, 2.0, 3.0, 2.0))
    assert costs.held_after_forward == pytest.approx((1 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 3))
    assert costs.whole_backward == pytest.approx((7.5, 5.0, 5.0, 7.5, 5.0))
    assert costs.message == 0.5


def test_a_whole_backward_may_have_another_time_than_its_halves():
    costs = CostModel.uniform(2, 1.0, 1.0, 1.0, backward=1.9)
    assert costs.whole_backward == (1.9, 1.9)
    assert simulate(hand_made("F0 B0", "F0 B0"), costs).makespan == pytest.approx(2 + 2 * 1.9)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "the cost forward of stage 0 is -1.0: give a finite number"),
        ({"backward_weight": math.nan}, "the cost backward_weight of stage 0 is nan"),
        ({"message": -0.5}, "the cost message is -0.5"),
        ({"kept": math.inf}, "the cost kept of stage 0 is inf"),
    ],
)
def test_an_invalid_cost_is_rejected_by_name(costs, message):
    with pytest.raises(ScheduleError, match=message):
        CostModel.uniform(2, **costs)


def test_costs_with_different_numbers_of_stages_are_rejected():
    with pytest.raises(ScheduleError, match="2 stages for forward and 3 for backward_input"):
        CostModel((1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0))


def test_costs_for_another_number_of_stages_are_rejected():
    with pytest.raises(ScheduleError, match="'1f1b' has 3 stages, but the costs have 2"):
        simulate(one_f_one_b(3, 3), CostModel.uniform(2))


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(ScheduleError, match=r"rank 0 waits at B0@0 for B0@1\n  rank 1 waits at F1"):
        simulate(hand_made("F0 B0 F1 B1", "F1 B1 F0 B0"), CostModel.uniform(2))


def test_a_plan_of_100_000_instructions_is_simulated():
    """98,304 steps: forward, and backward in two halves."""

    def program(rank):
        lead = 64 - rank
        order = []
        for m in range(512 + lead):
            order += [Instruction(Kind.FORWARD, rank, m)] if m < 512 else []
            back = m - lead
            order += [Instruction(Kind.BACKWARD_INPUT, rank, back)] if back >= 0 else []
            order += [Instruction(Kind.BACKWARD_WEIGHT, rank, back)] if back >= 0 else []
        return tuple(order)

    plan = Plan("halves", 512, loop(64), tuple(map(program, range(64))))
    assert sum(map(len, plan.programs)) == 98_304
    timeline = simulate(plan, CostModel.uniform(64))
    assert timeline.makespan >= 3 * 512
