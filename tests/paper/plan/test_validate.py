"""Tests of validation: rejected plans and their error messages."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan, forward_only
from tests.paper.hand_made_plans import hand_made, placements, runs_to_the_end, valid_plans

FEW = settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])


def _with_row(plan, rank, row):
    programs = list(plan.programs)
    programs[rank] = tuple(row)
    return replace(plan, programs=tuple(programs))


@st.composite
def _plan_and_place(draw, lowered=None):
    plan = draw(valid_plans())
    if draw(st.booleans()) if lowered is None else lowered:
        plan = lower(plan)
    rank = draw(st.integers(0, plan.num_ranks - 1))
    at = draw(st.integers(0, len(plan.programs[rank]) - 1))
    return plan, rank, at


@FEW
@given(_plan_and_place())
def test_a_plan_without_one_of_its_instructions_is_rejected(drawn):
    plan, rank, at = drawn
    validate(plan)
    row = plan.programs[rank]
    shorter = _with_row(plan, rank, row[:at] + row[at + 1 :])
    assume(not shorter.forward_only)  # without its only backward the plan is an evaluation
    with pytest.raises(ScheduleError):
        validate(shorter)


@FEW
@given(_plan_and_place(), st.integers(0, 50))
def test_a_plan_with_a_duplicate_instruction_is_rejected(drawn, to):
    plan, rank, at = drawn
    row = list(plan.programs[rank])
    row.insert(to % (len(row) + 1), row[at])
    with pytest.raises(ScheduleError, match=re.escape(f"@{row[at].stage}") + "|stage"):
        validate(_with_row(plan, rank, row))


@FEW
@given(_plan_and_place())
def test_a_plan_with_a_step_before_the_one_that_it_needs_is_rejected(drawn):
    plan, rank, at = drawn
    row = list(plan.programs[rank])
    need = plan.needs(row[at])
    assume(need in row)
    moved = row.pop(at)
    row.insert(row.index(need), moved)
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(_with_row(plan, rank, row))


@FEW
@given(_plan_and_place(lowered=True))
def test_a_plan_with_two_messages_of_a_channel_swapped_is_rejected(drawn):
    plan, rank, at = drawn
    row = list(plan.programs[rank])
    chosen = row[at]
    channel = [
        i for i, step in enumerate(row) if (step.kind, step.stage) == (chosen.kind, chosen.stage)
    ]
    assume(chosen.kind.is_message and len(channel) > 1)
    other = next(i for i in channel if i != at)
    row[at], row[other] = row[other], row[at]
    with pytest.raises(ScheduleError):
        validate(_with_row(plan, rank, row))


@FEW
@given(valid_plans(), st.integers(0, 2**32))
def test_a_shuffled_plan_is_accepted_exactly_when_it_runs_to_the_end(plan, seed):
    shuffled = random.Random(seed)
    plan = replace(
        plan, programs=tuple(tuple(shuffled.sample(row, len(row))) for row in plan.programs)
    )
    try:
        validate(plan)
    except ScheduleError:
        assert not runs_to_the_end(plan)
    else:
        assert runs_to_the_end(plan)


@FEW
@given(placements(), st.integers(1, 6))
def test_an_evaluation_needs_no_backward(rank_of_stage, num_microbatches):
    plan = forward_only(rank_of_stage, num_microbatches)
    assert plan.forward_only
    validate(lower(validate(plan)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_validate_returns_the_plan_unchanged(name):
    plan = lower(build_plan(name, 3, 4))
    assert validate(plan) is plan
    assert not plan.forward_only


@pytest.mark.parametrize(
    ("first_row", "message"),
    [
        ("F0 F0 F1 B0 B1", "F0@0 occurs 2 times instead of once"),
        ("F0 B0 B1", "F1@0 occurs 0 times instead of once"),
        ("F0 F1 B0", "micro-batch 1 at stage 0 has 0 B, 0 I and 0 W"),
        ("F0 F1 B0 B1 B1", "micro-batch 1 at stage 0 has 2 B, 0 I and 0 W"),
        ("F0 F1 B0 I0 W0 B1", "micro-batch 0 at stage 0 has 1 B, 1 I and 1 W"),
        ("F0 F1 B0 I1", "micro-batch 1 at stage 0 has 0 B, 1 I and 0 W; .* one I and one W"),
        ("F0 F1 B0 B1 F0@1", "F0@1 is on rank 0, but stage 1 is on rank 1"),
        ("F0 F1 B0 B1 F7", "F7@0: the micro-batches are 0 to 1"),
        ("F0 F1 B0 B1 F0@5", "F0@5: the stages are 0 to 1"),
        ("F0 F1 B0 W1 I1", "rank 0 waits at W1@0 for I1@0"),
    ],
)
def test_errors_name_the_instruction(first_row, message):
    plan = replace(hand_made(first_row, "F0 B0 F1 B1"), num_microbatches=2)
    with pytest.raises(ScheduleError, match=f"schedule 'hand-made'(?s:.*){message}"):
        validate(plan)


def test_ranks_that_wait_for_each_other_are_named_and_shown():
    with pytest.raises(ScheduleError) as refused:
        validate(hand_made("F0 B0 F1 B1", "F1 B1 F0 B0"))
    assert str(refused.value) == (
        "schedule 'hand-made' deadlocks:\n"
        "  rank 0 waits at B0@0 for B0@1\n"
        "  rank 1 waits at F1@1 for F1@0\n"
        "    rank 0   F0@0 > B0@0 F1@0 B1@0\n"
        "    rank 1   > F1@1 B1@1 F0@1 B0@1"
    )


def test_an_arrow_marks_a_duplicate_step():
    with pytest.raises(ScheduleError) as refused:
        validate(hand_made("F0 F1 B0 F1 B1", "F0 B0 F1 B1"))
    assert "rank 0   F0@0 F1@0 B0@0 > F1@0 B1@0" in str(refused.value)


def test_a_long_plan_is_shown_around_the_error():
    plan = build_plan("1f1b", 40, 80)
    row = list(plan.programs[39])
    row[100], row[101] = row[101], row[100]
    with pytest.raises(ScheduleError) as refused:
        validate(_with_row(plan, 39, row))
    message = str(refused.value)
    assert "rank 39 waits at B50@39 for F50@39\n  and 39 more ranks wait for them\n" in message
    assert "rank 39  .. B47@39" in message
    assert "> B50@39" in message
    assert "and 24 more ranks" in message
    assert len(message.splitlines()) < 40


MESSAGES = lower(hand_made("F0 F1 B0 B1", "F0 F1 B0 B1"), ahead=0)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "SA0@0", "", "SA0@0 occurs 0 times instead of once"),
        (1, "RA1@1", "", "RA1@1 occurs 0 times instead of once"),
        (1, "SG0@1", "SG0@1 SG0@1", "SG0@1 occurs 2 times instead of once"),
        (0, "B1@0", "B1@0 SG1@0", "SG1@0 occurs once but no other rank uses its result"),
        (1, "RA0@1 F0@1", "F0@1 RA0@1", "F0@1 uses the message of RA0@1, but comes before it"),
        (0, "RG1@0 B1@0", "B1@0 RG1@0", "B1@0 uses the message of RG1@0, but comes before it"),
        (0, "F0@0 SA0@0", "SA0@0 F0@0", "rank 0 waits at SA0@0 for F0@0"),
    ],
)
def test_errors_name_the_message(rank, old, new, message):
    text = " ".join(map(str, MESSAGES.programs[rank]))
    assert old in text
    changed = [Instruction.parse(word) for word in text.replace(old, new, 1).split()]
    with pytest.raises(ScheduleError, match=message):
        validate(_with_row(MESSAGES, rank, changed))


def test_a_channel_with_different_orders_is_shown_at_both_ends():
    plan = lower(hand_made("F0 F1", "F0 F1"))
    row = map(Instruction.parse, ["RA1@1", "RA0@1", "F0@1", "F1@1"])
    with pytest.raises(ScheduleError) as refused:
        validate(_with_row(plan, 1, row))
    assert str(refused.value) == (
        "schedule 'hand-made': rank 0 sends SA0@0 when rank 1 receives RA1@1: sends and "
        "receives of a channel must have the same order\n"
        "    rank 0   F0@0 > SA0@0 F1@0 SA1@0\n"
        "    rank 1   > RA1@1 RA0@1 F0@1 F1@1"
    )


def test_a_send_after_the_receive_of_its_reply_deadlocks():
    # Valid without messages; here the send of F0 comes after the backward that needs its reply.
    plan = lower(hand_made("F0 B0", "F0 B0"), ahead=0)
    row = map(Instruction.parse, ["F0@0", "RG0@0", "B0@0", "SA0@0"])
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits at B0@0 for SG0@1\n  rank 1 waits at F0"
    ):
        validate(_with_row(plan, 0, row))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_of_stage": (0, 2)}, "stage 1 is on rank 2, but there are 2 ranks"),
        ({"rank_of_stage": (0, 0)}, r"rank 1 holds no stage; rank_of_stage is \[0, 0\]"),
        ({"num_microbatches": 0}, "0 micro-batches and 2 stages; both must be at least 1"),
        ({"num_microbatches": 3}, "F2@0 occurs 0 times"),
    ],
)
def test_a_plan_with_inconsistent_sizes_is_rejected(change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(replace(hand_made("F0 F1 B0 B1", "F0 B0 F1 B1"), **change))
