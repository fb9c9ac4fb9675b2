"""Tests of instructions and plans: notation, files, dependencies."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules.building_blocks import loop, v
from pipemega.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.paper.hand_made_plans import hand_made, valid_plans


@given(st.sampled_from(Kind), st.integers(0, 999), st.integers(0, 999))
def test_an_instruction_reads_back_as_it_was_written(kind, stage, microbatch):
    step = Instruction(kind, stage, microbatch)
    assert Instruction.parse(str(step)) == step


def test_instructions_are_written_kind_microbatch_stage():
    assert str(Instruction(Kind.FORWARD, stage=1, microbatch=3)) == "F3@1"
    assert str(Instruction(Kind.RECV_GRADIENT, stage=2, microbatch=0)) == "RG0@2"


@pytest.mark.parametrize("text", ["", "F3", "X3@1", "F@1", "F3@", "F-1@0", "F3@1 ", "f3@1"])
def test_invalid_instructions_are_rejected(text):
    with pytest.raises(
        ScheduleError, match=r"is not an instruction: .* as in F3@1; the kinds are F,"
    ):
        Instruction.parse(text)


@settings(max_examples=50)
@given(valid_plans())
def test_a_plan_reads_back_from_json_and_from_csv(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(lower(plan).to_json()) == lower(plan)
    assert Plan.from_csv(lower(plan).to_csv(), name="random") == plan


def test_the_json_format_of_a_plan():
    assert json.loads(one_f_one_b(2, 2).to_json()) == {
        "name": "1f1b",
        "num_microbatches": 2,
        "rank_of_stage": [0, 1],
        "programs": [["F0@0", "F1@0", "B0@0", "B1@0"], ["F0@1", "B0@1", "F1@1", "B1@1"]],
    }


def test_the_csv_of_a_plan_is_what_torch_reads():
    assert one_f_one_b(2, 2).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_empty_cells_of_a_csv_are_skipped():
    plan = Plan.from_csv("0F0, ,,0B0\n,1F0,1B0,\n", name="hand-made")
    assert plan == hand_made("F0 B0", "F0 B0")


GOOD = '{"name": "x", "num_microbatches": 1, "rank_of_stage": [0], "programs": [["F0@0", "B0@0"]]}'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "expected a plan in JSON"),
        (
            '"name": "x", ',
            "",
            "needs the keys name, num_microbatches, rank_of_stage, programs, not",
        ),
        ('"name"', '"nmae"', "not .*nmae"),
        ('"x"', "3", "a string as name"),
        ("1,", "true,", "an integer as num_microbatches"),
        ("[0]", '["a"]', "rank_of_stage"),
        ('[["F0@0", "B0@0"]]', "[3]", "one list of instructions per rank"),
        ("B0@0", "B0", "rank 0: 'B0' is not an instruction"),
    ],
)
def test_invalid_json_plans_are_rejected_with_the_reason(old, new, message):
    assert Plan.from_json(GOOD).name == "x"
    with pytest.raises(ScheduleError, match=message):
        Plan.from_json(GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "rank 0: '0X0' is not an instruction of a plan in CSV: .* as in 1F3"),
        ("0F0,0B0\n1F0,0B0\n", "stage 0 of the plan in CSV is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", r"the stages of the plan in CSV are \[0, 2\]: number them from 0"),
        ("", r"the stages of the plan in CSV are \[\]"),
    ],
)
def test_invalid_csv_plans_are_rejected_with_the_reason(text, message):
    with pytest.raises(ScheduleError, match=message):
        Plan.from_csv(text)


def test_a_step_needs_the_step_that_it_waits_for():
    plan = hand_made("F0 I0 W0", "F0 B0", "F0 I0 W0")
    needs = {str(step): str(plan.needs(step)) for step in plan.steps()}
    assert needs == {
        "F0@0": "None",
        "F0@1": "F0@0",
        "F0@2": "F0@1",
        "I0@2": "F0@2",
        "W0@2": "I0@2",
        "B0@1": "I0@2",
        "I0@0": "B0@1",
        "W0@0": "I0@0",
    }


def test_in_a_lowered_plan_a_step_needs_the_send_of_another_rank():
    plan = lower(hand_made("F0 F0@3 B0@3 B0", "F0 F0@2 B0@2 B0", rank_of_stage=v(2)))
    needs = {str(step): str(plan.needs(step)) for step in plan.steps()}
    assert needs["F0@1"] == "SA0@0"
    assert needs["F0@2"] == "F0@1"
    assert needs["B0@2"] == "SG0@3"
    assert needs["B0@1"] == "B0@2"
    assert (needs["SA0@0"], needs["SG0@3"]) == ("F0@0", "B0@3")
    assert (needs["RA0@1"], needs["RG0@0"]) == ("None", "None")


def test_placements_are_as_drawn():
    plan = Plan("x", 1, loop(4, 2), ((),) * 4)
    assert [plan.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    plan = Plan("x", 1, v(4, 2), ((),) * 4)
    assert [plan.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert v(2, 3) == (0, 1, 1, 0, 0, 1)
    assert v(5, 1) == loop(5, 1)
