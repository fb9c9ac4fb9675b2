"""The schedules, against their drawings, the literature and their own formulas."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.config.pipeline import Schedule
from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.render import draw
from pipemega.pipeline.schedules import (
    NOT_YET,
    SCHEDULES,
    ShareCosts,
    Sizes,
    build_plan,
    find_schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.validate import validate
from tests.paper.plans import placements

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
PUBLISHED = {"naive": "sequential", "gpipe": "gpipe", "1f1b": "1f1b"}

names = st.sampled_from(sorted(SCHEDULES))
times = st.floats(0.1, 5)
share_costs = st.builds(ShareCosts, times, times, times, st.floats(0, 5))
pp_sizes = st.integers(1, 9)
num_microbatches_ = st.integers(1, 20)


def _simulate(plan, costs):
    return simulate(plan, CostModel.shared(plan.rank_of_stage, *costs))


def _drawing(docstring):
    rows = [line.strip() for line in docstring.splitlines() if line.strip().startswith("rank ")]
    assert rows
    return "\n".join(rows)


@pytest.mark.parametrize("schedule", [sequential, gpipe, one_f_one_b])
def test_every_schedule_reads_as_drawn(schedule):
    sizes = re.search(r"pp_size=(\d+), num_microbatches=(\d+), backward as long", schedule.__doc__)
    plan = schedule(*map(int, sizes.groups()))
    drawn = draw(simulate(plan, CostModel.uniform(plan.num_stages, backward=1.0)))
    assert drawn == _drawing(schedule.__doc__)


def test_an_evaluation_reads_as_drawn():
    plan = forward_only(v(2), 4)
    assert draw(simulate(plan, CostModel.uniform(4))) == _drawing(forward_only.__doc__)


@given(names, pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_every_schedule_keeps_the_rules_with_and_without_messages(name, pp_size, num_microbatches):
    plan = validate(build_plan(name, pp_size, num_microbatches))
    validate(lower(plan))
    assert (plan.name, plan.num_ranks, plan.num_microbatches) == (name, pp_size, num_microbatches)


@given(names, pp_sizes, num_microbatches_, share_costs)
@settings(deadline=None, max_examples=200)
def test_every_formula_is_what_the_simulation_says(name, p, m, costs):
    family, sizes = SCHEDULES[name], Sizes(p, m)
    timeline = _simulate(build_plan(name, p, m), costs)
    assert family.makespan(sizes, costs) == pytest.approx(timeline.makespan, rel=1e-9)
    assert family.bubble(sizes, costs) == pytest.approx(timeline.bubble, abs=1e-9)
    assert [family.peak(sizes, rank) for rank in range(p)] == pytest.approx(timeline.peak)


@given(names, pp_sizes, num_microbatches_, share_costs)
@settings(deadline=None)
def test_every_formula_that_is_printed_is_the_one_that_is_computed(name, p, m, costs):
    family, sizes = SCHEDULES[name], Sizes(p, m)
    words = {"p": p, "m": m, "min": min, **dict(zip("FIWc", costs, strict=True))}
    makespan = eval(family.makespan_formula, words)
    assert makespan == pytest.approx(family.makespan(sizes, costs))
    for rank in range(p):
        assert eval(family.peak_formula, {**words, "r": rank}) == family.peak(sizes, rank)


@pytest.mark.parametrize(
    "row",
    [row for row in GOLDEN["named"] if row["name"] in PUBLISHED],
    ids=lambda row: f"{row['name']}-p{row['p']}-m{row['m']}-{row['cost']}",
)
def test_every_schedule_takes_the_time_memory_and_messages_of_the_golden_table(row):
    plan = build_plan(PUBLISHED[row["name"]], row["p"], row["m"])
    timeline = _simulate(plan, ShareCosts(*GOLDEN["costs"][row["cost"]]))
    assert timeline.makespan == pytest.approx(row["makespan"], abs=1e-9)
    assert timeline.span == pytest.approx(row["span"], abs=1e-9)
    assert max(timeline.peak) == pytest.approx(row["peak"])
    sends = {Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT}
    assert sum(step.kind in sends for step in lower(plan).steps()) == row["messages"]


@given(pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_1f1b_never_holds_more_than_pp_size_minus_rank_microbatches(pp_size, num_microbatches):
    for rank, program in enumerate(one_f_one_b(pp_size, num_microbatches).programs):
        held = 0
        for step in program:
            held += 1 if step.kind is Kind.FORWARD else -1
            assert held <= min(num_microbatches, pp_size - rank)


@given(names, pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_backward_goes_in_the_order_of_the_microbatches(name, pp_size, num_microbatches):
    # So that gradients add up in one order, and a change of schedule changes no bit of them.
    for program in build_plan(name, pp_size, num_microbatches).programs:
        backward = [step.microbatch for step in program if step.kind is Kind.BACKWARD]
        assert backward == list(range(num_microbatches))


# Evaluation


@given(placements(), num_microbatches_)
@settings(deadline=None)
def test_an_evaluation_runs_each_forward_once_under_any_placement(rank_of_stage, m):
    plan = validate(forward_only(rank_of_stage, m))
    validate(lower(plan))
    steps = Counter((step.kind, step.stage, step.microbatch) for step in plan.steps())
    assert steps == Counter(
        (Kind.FORWARD, s, i) for s in range(len(rank_of_stage)) for i in range(m)
    )


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("place", [loop, v])
@pytest.mark.parametrize("pp_size", [1, 2, 4, 8])
def test_an_evaluation_keeps_every_rank_busy(pp_size, place, chunks):
    num_microbatches = 8 * pp_size
    plan = forward_only(place(pp_size, chunks), num_microbatches)
    makespan = simulate(plan, CostModel.uniform(plan.num_stages)).makespan
    work = num_microbatches * chunks
    # The first result takes a way down the ranks to the last one; where stages turn, also back.
    if place is loop or chunks == 1:
        assert makespan == work + pp_size - 1
    assert makespan <= work + 2 * (pp_size - 1) * (1 if place is loop else 2)


def test_an_evaluation_does_not_run_ahead_of_a_slow_rank():
    # Rank 1 has three stages for two of rank 0, which could pile up all micro-batches meanwhile.
    plan = forward_only((0, 1, 1, 1, 0), 40)
    under_way = most = 0
    for step in plan.programs[0]:
        under_way += {0: 1, 4: -1}[step.stage]
        most = max(most, under_way)
    assert most <= 2 * plan.num_ranks


# Names and sizes


def test_a_schedule_goes_by_its_other_names_too():
    assert build_plan("f-then-b", 2, 4) == build_plan("gpipe", 2, 4)


def test_the_config_takes_every_schedule_that_there_is():
    assert get_args(Schedule) == tuple(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1F1B", "unknown schedule '1F1B'; did you mean '1f1b'?"),
        ("gpip", "unknown schedule 'gpip'; did you mean 'gpipe'? the schedules are sequential,"),
        ("F-then-B", "did you mean 'f-then-b'?"),
        ("zbv", "did you mean 'zb-v'? (That one is not there yet.) the schedules are"),
        ("quixotic", "unknown schedule 'quixotic': the schedules are sequential, gpipe, 1f1b"),
    ],
)
def test_an_unknown_schedule_is_answered_with_the_nearest(name, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build_plan(name, 2, 4)


@pytest.mark.parametrize("name", NOT_YET)
def test_a_schedule_that_is_to_come_is_answered_as_such(name):
    with pytest.raises(ScheduleError, match=f"schedule '{name}' is not there yet: the schedules "):
        find_schedule(name)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), "schedule '1f1b' for 0 pipeline ranks: give at least 1"),
        ((2, 0), "schedule '1f1b' for 0 micro-batches: give at least 1"),
        ((2, 4, 0), "schedule '1f1b' for 0 chunks: give at least 1"),
        ((2, 4, 2), "'1f1b' runs one stage per rank, and pipeline.chunks is 2: set it to 1"),
    ],
)
def test_sizes_that_a_schedule_cannot_take_are_refused(sizes, message):
    with pytest.raises(ScheduleError, match=message):
        build_plan("1f1b", *sizes)
