"""The limit of the queue of W: plans stay valid, and the queue stays within the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemega.config import load
from pipemega.errors import ConfigError
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.lowering import limit_weight_queue, lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan, splits_backward
from tests.paper.hand_made_plans import queued_bytes, with_w_last


def rank_0(plan: Plan) -> str:
    return " ".join(f"{step.kind.value}{step.microbatch}" for step in plan.programs[0])


def test_w_runs_before_the_i_that_would_exceed_the_limit():
    plan = Plan.from_csv("0F0,0I0,0F1,0I1,0W0,0W1")
    assert rank_0(limit_weight_queue(plan, [1.0], 1.0)) == "F0 I0 F1 W0 I1 W1"
    assert rank_0(limit_weight_queue(plan, [1.0], 2.0)) == rank_0(plan)


def test_a_whole_backward_replaces_an_i_that_alone_exceeds_the_limit():
    plan = Plan.from_csv("0F0,0I0,0F1,0I1,0W0,0W1")
    assert rank_0(limit_weight_queue(plan, [1.0], 0.5)) == "F0 B0 F1 B1"
    two_stages = Plan.from_csv("0F0,1F0,1I0,0I0,0F1,1F1,1I1,0I1,0W0,1W0,0W1,1W1")
    limited = limit_weight_queue(two_stages, [1.0, 3.0], 2.0)
    assert [str(s) for s in limited.programs[0]] == [
        "F0@0", "F0@1", "B0@1", "I0@0", "F1@0", "F1@1", "W0@0", "B1@1", "I1@0", "W1@0",
    ]  # fmt: skip


@given(
    st.sampled_from([name for name in SCHEDULES if splits_backward(name)]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=8, max_size=8),
    st.sampled_from([0.0, 0.7, 1.0, 2.5, 4.0, 100.0]),
)
def test_every_limited_plan_is_valid_and_its_queue_stays_within_the_limit(
    name, ranks, num_microbatches, sizes, limit
):
    plan = build_plan(name, ranks, num_microbatches)
    kept = sizes[: plan.num_stages]
    limited = limit_weight_queue(plan, kept, limit)
    validate(limited)
    validate(lower(limited))
    for program in limited.programs:
        assert queued_bytes(program, kept) <= limit + 1e-9
        for stage in range(plan.num_stages):
            order = [
                step.microbatch
                for step in program
                if step.stage == stage and step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            ]
            assert order == sorted(order)


@pytest.mark.parametrize("limit", [0.0, 1.0, 2.5, 100.0])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_plan_whose_w_have_another_order_than_its_i_is_valid_within_the_limit(name, limit):
    plan = Plan.from_json(with_w_last(build_plan(name, 3, 7)).to_json())
    kept = [1.0, 0.5, 1.0, 0.5, 0.5, 1.0][: plan.num_stages]
    limited = limit_weight_queue(plan, kept, limit)
    validate(lower(limited))
    assert all(queued_bytes(program, kept) <= limit for program in limited.programs)
    assert (limited == plan) == (limit == 100.0)


def test_a_limit_trades_time_for_memory():
    plan = build_plan("zb-h1", 4, 8)
    # As with activation checkpointing: I recomputes what F released.
    costs = CostModel.uniform(4, kept=10.0)
    free, limited = (
        simulate(p, costs) for p in (plan, limit_weight_queue(plan, costs.held_after_input, 10.0))
    )
    fused = simulate(limit_weight_queue(plan, costs.held_after_input, 0.0), costs)
    assert free.peak == (13, 22, 31, 40)
    assert max(limited.peak) == 13
    assert max(fused.peak) == 4
    assert free.makespan <= limited.makespan <= fused.makespan


def test_the_schedules_with_split_backward_are_known():
    assert [name for name in SCHEDULES if splits_backward(name)] == [
        "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v", "v-half", "v-min",
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_limit_for_a_schedule_without_w_is_an_error(schedule):
    pipeline = {"schedule": schedule, "weight_queue_limit": 1000}
    with pytest.raises(ConfigError, match=r"pipeline\.weight_queue_limit .* has whole backwards"):
        load({"train_batch_size": 8, "pipeline": pipeline})


@pytest.mark.parametrize("schedule", ["zb-h1", "auto", {"file": "mine.csv"}])
def test_a_limit_is_accepted_with_schedules_that_may_split_backward(schedule):
    pipeline = {"schedule": schedule, "weight_queue_limit": 0}
    assert load({"train_batch_size": 8, "pipeline": pipeline}).pipeline.weight_queue_limit == 0
