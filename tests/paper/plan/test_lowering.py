"""Tests of lowering: the position of messages in a plan."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import add_messages, hoist_receives, lower
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from tests.paper.hand_made_plans import hand_made, valid_plans


def _row(plan, rank):
    """The program of a rank that holds one stage, without its number."""
    return " ".join(str(step).split("@")[0] for step in plan.programs[rank])


@settings(max_examples=150)
@given(valid_plans(), st.integers(0, 3))
def test_every_valid_plan_is_valid_with_messages(plan, ahead):
    lowered = lower(validate(plan), ahead)
    validate(lowered)
    assert lowered.compute_only() == plan


@pytest.mark.parametrize("name", SCHEDULES)
def test_exactly_the_results_that_other_ranks_use_are_sent(name):
    lowered = lower(build_plan(name, 3, 5))
    kinds = Counter(step.kind for step in lowered.steps())
    boundaries = sum(map(lowered.crosses, range(lowered.num_stages)))
    between_stages = [kind for kind in Kind if kind.is_message and not kind.is_vocabulary]
    assert {kind: kinds[kind] for kind in between_stages} == dict.fromkeys(
        between_stages, boundaries * 5
    )


def test_receives_are_hoisted_as_drawn():
    plan = add_messages(build_plan("1f1b", 2, 3))
    assert _row(plan, 0) == "F0 SA0 F1 SA1 RG0 B0 F2 SA2 RG1 B1 RG2 B2"
    assert _row(hoist_receives(plan, 0), 0) == _row(plan, 0)
    assert _row(hoist_receives(plan, 1), 0) == "F0 SA0 RG0 F1 SA1 B0 RG1 F2 SA2 RG2 B1 B2"


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_receive_is_posted_that_many_compute_steps_before_its_use(name, ahead):
    for program in lower(build_plan(name, 4, 6), ahead).programs:
        compute = [step for step in program if not step.kind.is_message]
        for at, receive in enumerate(program):
            kinds = {"RA": "F", "RG": "BI"}
            if receive.kind.value not in kinds:
                continue
            users = [receive._replace(kind=Kind(kind)) for kind in kinds[receive.kind.value]]
            use = next(compute.index(user) for user in users if user in compute)
            run_before = sum(not step.kind.is_message for step in program[:at])
            assert run_before == max(0, use - ahead)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_send_comes_right_after_the_step_that_made_it(name):
    for program in lower(build_plan(name, 4, 6)).programs:
        for before, step in pairwise(program):
            if step.kind is Kind.SEND_ACTIVATION:
                assert before == step._replace(kind=Kind.FORWARD)
            if step.kind is Kind.SEND_GRADIENT:
                assert before in (
                    step._replace(kind=Kind.BACKWARD),
                    step._replace(kind=Kind.BACKWARD_INPUT),
                )


def test_receives_keep_the_order_of_their_channel():
    plan = hand_made("F0 F1 B1 B0", "F1 F0 B1 B0")
    lowered = add_messages(validate(plan))
    assert _row(lowered, 1) == "RA0 RA1 F1 F0 B1 SG1 B0 SG0"
    validate(lowered)


def test_stages_on_one_rank_exchange_no_messages():
    plan = hand_made("F0@0 F0@1 B0@1 B0@0", rank_of_stage=(0, 0))
    assert lower(plan) == plan


def test_lowering_a_lowered_plan_changes_nothing():
    lowered = lower(build_plan("1f1b", 4, 6))
    assert lower(lowered) == lowered
