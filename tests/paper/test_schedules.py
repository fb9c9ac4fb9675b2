"""The schedules, against their drawings, the literature and their own formulas."""

import json
import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.config.pipeline import _LATER, FIXED_CHUNKS, Schedule
from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.render import draw
from pipemega.pipeline.schedules import (
    SCHEDULES,
    SYNTHESIZED,
    ShareCosts,
    Sizes,
    build_plan,
    dual_pipe_v,
    find_schedule,
    forward_only,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    one_f_one_b_v,
    sequential,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipemega.pipeline.schedules.interleaved import groups_of
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.validate import validate, validate_meeting
from tests.paper.plans import placements

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
# Name in the golden table -> name and chunks here.
PUBLISHED = {
    "naive": ("sequential", 1),
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "loopedbfs-v2": ("looped-bfs", 2),
    "interleaved-v2": ("interleaved", 2),
    "interleaved-v4": ("interleaved", 4),
    "zb-h1": ("zb-h1", 1),
    "zb-h2": ("zb-h2", 1),
    "interleaved-zb-v1": ("interleaved-zb", 1),
    "interleaved-zb-v2": ("interleaved-zb", 2),
    "interleaved-zb-v4": ("interleaved-zb", 4),
    "zbv-torch": ("zb-v", 2),
    "dualpipev": ("dualpipe-v", 2),
    "v-half": ("v-half", 2),
    "v-min": ("v-min", 2),
    "1f1b-v": ("1f1b-v", 2),
}

times = st.floats(0.1, 5)
share_costs = st.builds(ShareCosts, times, times, times, st.floats(0, 5))
WRITERS = [
    sequential, gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_h2, interleaved_zb, zb_v,
    dual_pipe_v, v_half, v_min, one_f_one_b_v,
]  # fmt: skip
# Near the ranges that formulas are exact in: round numbers, cheap messages, W <= F <= I.
near_costs = st.builds(
    ShareCosts,
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([1.0, 1.5, 2.0]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 0.0, 0.05, 0.1, 0.3]),
)
pp_sizes = st.integers(1, 9)
num_microbatches_ = st.integers(1, 20)


@st.composite
def cases(draw):
    """A family, and sizes that it takes."""
    family = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    chunks = family.chunks or draw(st.integers(1, 4))
    return family, Sizes(draw(pp_sizes), draw(num_microbatches_), chunks)


def _simulate(plan, costs):
    return simulate(plan, CostModel.shared(plan.rank_of_stage, *costs))


def _drawing(docstring):
    rows = [line.strip() for line in docstring.splitlines() if line.strip().startswith("rank ")]
    assert rows
    return "\n".join(rows)


@pytest.mark.parametrize("schedule", WRITERS, ids=lambda schedule: schedule.__name__)
def test_every_schedule_reads_as_drawn(schedule):
    sizes = re.search(
        r"pp_size=(\d+), num_microbatches=(\d+)(?:, chunks=(\d+))?, "
        r"(?:backward as long as forward|all steps equally long):",
        schedule.__doc__,
    )
    plan = schedule(*(int(size) for size in sizes.groups() if size))
    drawn = draw(simulate(plan, CostModel.uniform(plan.num_stages, backward=1.0)))
    assert drawn == _drawing(schedule.__doc__)


def test_every_schedule_has_a_function_that_writes_it():
    assert [schedule(2, 4).name for schedule in WRITERS] == list(SCHEDULES)


def test_an_evaluation_reads_as_drawn():
    plan = forward_only(v(2), 4)
    assert draw(simulate(plan, CostModel.uniform(4))) == _drawing(forward_only.__doc__)


@given(cases())
@settings(deadline=None, max_examples=300)
def test_every_schedule_keeps_the_rules_with_and_without_messages(case):
    family, sizes = case
    plan = validate(build_plan(family.name, *sizes))
    validate(lower(plan))
    assert (plan.name, plan.num_ranks, plan.num_microbatches) == (family.name, *sizes[:2])
    assert plan.rank_of_stage == {"loop": loop, "v": v}[family.placement](sizes[0], sizes[2])


def _check_makespan(family, sizes, costs):
    """Whether the formula is said to hold; then it must."""
    if not family.exact(sizes, costs):
        return False
    timeline = _simulate(build_plan(family.name, *sizes), costs)
    assert family.makespan(sizes, costs) == pytest.approx(timeline.makespan, rel=1e-9)
    assert family.bubble(sizes, costs) == pytest.approx(timeline.bubble, abs=1e-9)
    return True


@given(cases(), share_costs | near_costs)
@settings(deadline=None, max_examples=400)
def test_every_makespan_by_formula_is_the_simulated_one_wherever_it_is_said_to_hold(case, costs):
    _check_makespan(*case, costs)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_makespan_formula_holds_at_equal_costs_somewhere_and_there_it_is_right(name, p):
    family = SCHEDULES[name]
    chunks = [family.chunks] if family.chunks else [1, 2, 4]
    held = [
        _check_makespan(family, Sizes(p, m, v), ShareCosts(message=message))
        for m in {1, p, p + 1, 2 * p - 1, 2 * p, 3 * p}
        for v in chunks
        for message in (0.0, 0.02)
    ]
    silent = {("v-half", 1), ("v-half", 2), ("v-min", 1)}
    silent |= {("1f1b-v", p) for p in (2, 3, 6)}
    assert any(held) == ((name, p) not in silent)


@given(cases())
@settings(deadline=None, max_examples=300)
def test_no_rank_holds_more_than_the_formula_says_and_the_fullest_as_much(case):
    family, sizes = case
    peaks = _simulate(build_plan(family.name, *sizes), ShareCosts()).peak
    formula = [family.peak(sizes, rank) for rank in range(sizes.pp_size)]
    assert max(peaks) == pytest.approx(max(formula))
    assert all(held <= most + 1e-9 for held, most in zip(peaks, formula, strict=True))
    if family.name not in ("v-half", "v-min", "1f1b-v"):
        assert formula == pytest.approx(peaks)


@given(cases(), share_costs | near_costs)
@settings(deadline=None, max_examples=300)
def test_every_formula_that_is_printed_is_the_one_that_is_computed(case, costs):
    family, sizes = case
    words = dict(zip("pmv", sizes, strict=True)) | dict(zip("FIWc", costs, strict=True))
    words |= {"min": min, "max": max, "ceil": math.ceil}
    assert eval(family.makespan_formula, words) == pytest.approx(family.makespan(sizes, costs))
    assert eval(family.exact_formula, words) == family.exact(sizes, costs)
    for rank in range(sizes.pp_size):
        peak = eval(family.peak_formula, words | {"r": rank})
        assert peak == pytest.approx(family.peak(sizes, rank))


@pytest.mark.parametrize(
    "row",
    [row for row in GOLDEN["named"] if row["name"] in PUBLISHED],
    ids=lambda row: f"{row['name']}-p{row['p']}-m{row['m']}-{row['cost']}",
)
def test_every_schedule_takes_the_time_memory_and_messages_of_the_golden_table(row):
    name, chunks = PUBLISHED[row["name"]]
    plan = build_plan(name, row["p"], row["m"], chunks)
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


@given(cases())
@settings(deadline=None, max_examples=200)
def test_every_kind_of_step_goes_in_the_order_of_the_microbatches_at_every_stage(case):
    # So that gradients add up in one order, and a change of schedule changes no bit of them.
    family, sizes = case
    plan = build_plan(family.name, *sizes)
    for kinds in ("F", "BI", "BW"):
        for stage, rank in enumerate(plan.rank_of_stage):
            steps = [step for step in plan.programs[rank] if step.stage == stage]
            order = [step.microbatch for step in steps if step.kind.value in kinds]
            assert order == list(range(sizes.num_microbatches)), (kinds, stage)


@given(pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_interleaved_with_as_many_microbatches_as_ranks_waits_a_share_of_what_1f1b_does(p, m):
    costs = ShareCosts(1.0, 1.25, 0.75)
    for chunks in (2, 3, 5):
        thick, thin = (
            SCHEDULES[name].makespan(Sizes(p, m, v), costs) - 3 * m
            for name, v in (("1f1b", 1), ("interleaved", chunks))
        )
        late = (chunks - 1) * max(0, p - m) / chunks * 3
        assert thin == pytest.approx(thick / chunks + late)


@given(pp_sizes, num_microbatches_)
def test_groups_are_even_and_never_smaller_than_the_pipeline_if_they_need_not_be(p, m):
    groups = groups_of(p, m)
    assert sum(groups) == m
    assert max(groups) - min(groups) <= 1
    assert min(groups) >= min(p, m)
    assert max(groups) < 2 * p
    assert list(groups) == sorted(groups, reverse=True)


@given(pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_one_chunk_takes_interleaved_zero_bubble_back_to_zb_h1(p, m):
    assert interleaved_zb(p, m, 1).programs == zb_h1(p, m).programs


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), share_costs)
@settings(deadline=None)
def test_with_free_messages_breadth_first_and_interleaved_take_equally_long(p, m, v, costs):
    costs = costs._replace(message=0.0)
    first, second = (_simulate(write(p, m, v), costs) for write in (interleaved, looped_bfs))
    assert first.makespan == pytest.approx(second.makespan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_32_ranks_and_128_microbatches_are_written_in_seconds(name):
    began = time.process_time()
    build_plan(name, 32, 128)
    assert time.process_time() - began < 5


# How many compute steps ahead receives must be posted so that sends may wait for them.
AHEAD = {
    "sequential": 0,
    "gpipe": 0,
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 2,
}


@given(st.sampled_from(sorted(AHEAD)), pp_sizes, num_microbatches_)
@settings(deadline=None)
def test_the_plain_schedules_run_even_where_each_send_waits_for_its_receive(name, p, m):
    validate_meeting(lower(build_plan(name, p, m), ahead=AHEAD[name]))


@given(cases())
@settings(deadline=None)
def test_every_schedule_runs_where_sends_wait_if_all_receives_are_posted_at_first(case):
    family, sizes = case
    plan = build_plan(family.name, *sizes)
    validate_meeting(lower(plan, ahead=max(map(len, plan.programs))))


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


def test_the_config_takes_or_refuses_by_name_every_schedule_that_there_is():
    assert {*get_args(Schedule), *_LATER} == {*SCHEDULES, SYNTHESIZED}
    assert not {*get_args(Schedule)} & {*_LATER}


def test_the_config_knows_which_schedules_take_one_number_of_chunks_alone():
    fixed = {name: family.chunks for name, family in SCHEDULES.items() if family.chunks}
    assert fixed == FIXED_CHUNKS


def test_a_schedule_has_its_usual_chunks_where_none_are_given():
    for name, family in SCHEDULES.items():
        assert build_plan(name, 2, 4).num_stages == 2 * family.usual_chunks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1F1B", "unknown schedule '1F1B'; did you mean '1f1b'?"),
        ("gpip", "unknown schedule 'gpip'; did you mean 'gpipe'? the schedules are sequential,"),
        ("F-then-B", "did you mean 'f-then-b'?"),
        ("zbv", "did you mean 'zb-v'? the schedules are"),
        ("Auto", "did you mean 'auto'? the schedules are"),
        ("autoo", "did you mean 'auto'? the schedules are"),
        ("quixotic", "unknown schedule 'quixotic': the schedules are sequential, gpipe, 1f1b"),
    ],
)
def test_an_unknown_schedule_is_answered_with_the_nearest(name, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build_plan(name, 2, 4)


def test_the_one_that_is_looked_for_says_how():
    message = (
        "schedule 'auto' is not written down but looked for, by costs and a memory limit: python"
    )
    with pytest.raises(ScheduleError, match=message):
        find_schedule("auto")


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


def test_chunks_that_a_v_cannot_take_are_refused():
    message = "'zb-v' runs 2 stages per rank, placed in a v, and pipeline.chunks is 3: set it to 2"
    with pytest.raises(ScheduleError, match=message):
        build_plan("zb-v", 2, 4, 3)
