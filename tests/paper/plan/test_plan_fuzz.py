"""Fuzz tests: a damaged plan or timeline file is read, or rejected with an error that says why."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemega.config import load
from pipemega.errors import PipemegaError, ScheduleError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.plan_selection import training_plan
from pipemega.pipeline.schedules import build_plan
from pipemega.profiling.step_trace import FORMAT, Trace
from tests.paper.mutations import changed, damaged, fuzzing, text_of

PLANS = [build_plan(*sizes) for sizes in (("1f1b", 2, 3), ("zb-v", 2, 4), ("interleaved", 2, 4, 2))]
TREES = [json.loads(plan.to_json()) for plan in PLANS]
TRACE = {
    "format": FORMAT,
    "step": 1,
    "clock_error": 0.0,
    "plan": TREES[0],
    "began": [0.0, 0.0],
    "ready": [[float(at) for at, _ in enumerate(program)] for program in PLANS[0].programs],
    "end": [[at + 0.5 for at, _ in enumerate(program)] for program in PLANS[0].programs],
    "memory": None,
}


def use(plan: Plan) -> None:
    """What is done with a plan that somebody brought."""
    validate(plan)
    validate(lower(plan))
    simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage))
    assert Plan.from_json(plan.to_json()) == plan


def read(way, text: str) -> str:
    """Why it was refused; empty where it was not."""
    try:
        found = way(text)
        use(found if isinstance(found, Plan) else found.plan)
    except PipemegaError as error:
        return str(error) or "nothing was said"
    return ""


@fuzzing(80)
@given(st.sampled_from(TREES).flatmap(changed))
def test_a_plan_in_json_with_a_changed_structure_is_read_or_rejected(tree):
    assert read(Plan.from_json, text_of(tree)) != "nothing was said"


@fuzzing(60)
@given(st.sampled_from(PLANS).flatmap(lambda plan: damaged(plan.to_csv().encode())))
def test_a_damaged_plan_in_csv_is_read_or_rejected(raw):
    assert read(Plan.from_csv, raw.decode("latin-1")) != "nothing was said"


@fuzzing(60)
@given(st.text("0123FBIW,\n\"' 9\x00", max_size=40))
def test_any_text_in_place_of_a_plan_in_csv_is_read_or_rejected(text):
    assert read(Plan.from_csv, text) != "nothing was said"


@fuzzing(60)
@given(changed(TRACE))
def test_a_timeline_with_a_changed_structure_is_read_or_rejected(tree):
    assert read(Trace.from_json, text_of(tree)) != "nothing was said"


@fuzzing(60)
@given(st.sampled_from(PLANS).flatmap(lambda plan: damaged(plan.to_json().encode())))
def test_a_damaged_file_of_a_plan_is_used_or_rejected_by_name(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    path.write_bytes(raw)
    section = load({"pipeline": {"schedule": {"file": str(path)}}, "train_batch_size": 4}).pipeline
    refusal = read(lambda _: training_plan(section, 2, 4, 4, "queues"), "")
    assert refusal != "nothing was said"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"name": "x", "num_microbatches": ' + "9" * 5000 + "}",
        json.dumps(TREES[0] | {"num_microbatches": 10**15}),
        json.dumps(TREES[0] | {"programs": [["F" + "9" * 5000 + "@0"]]}),
    ],
    ids=["deep", "long number", "large number", "long number in a step"],
)
def test_texts_that_break_a_json_reader_are_rejected(text):
    with pytest.raises(ScheduleError):
        validate(Plan.from_json(text))


@pytest.mark.parametrize("text", ["0F0," + "9" * 5000, "0F" + "9" * 5000, '0F0,"' + "x" * 200_000])
def test_texts_that_break_a_csv_reader_are_rejected(text):
    with pytest.raises(ScheduleError):
        Plan.from_csv(text)
