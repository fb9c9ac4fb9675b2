"""Schedule `auto`: what it makes keeps the rules and the limit, and beats what is named."""

import json
import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.schedules import SCHEDULES, ShareCosts, Sizes, build_plan
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.synthesis import (
    Layout,
    layouts_of_shares,
    layouts_of_stages,
    prove,
    synthesize,
)
from pipemega.pipeline.synthesis.anneal import anneal, critical_path
from pipemega.pipeline.synthesis.bounds import least_makespan
from pipemega.pipeline.synthesis.clock import makespan, play
from pipemega.pipeline.synthesis.dates import Policy
from pipemega.pipeline.synthesis.exact import solve
from pipemega.pipeline.synthesis.greedy import construct
from pipemega.pipeline.synthesis.problem import Problem
from pipemega.pipeline.validate import validate, validate_meeting

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
REAL = ShareCosts(1.0, 1.2, 0.8, 0.1)
# As a share of the usual effort: enough to find something, and quick.
QUICK = 0.01


@st.composite
def pipelines(draw):
    """Layouts of unequal stages, micro-batches, and a limit that can be kept, if any."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    times = st.sampled_from([0.0, 0.3, 0.9, 1.0, 1.1, 2.0]) | st.floats(0, 2)
    sizes = st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0])
    kept = st.sampled_from([0.0, 0.5, 1.0, 5.0, 13.0])

    def per_stage(values):
        return tuple(draw(values) for _ in range(ranks * chunks))

    costs = CostModel(
        per_stage(times),
        per_stage(times),
        per_stage(times),
        draw(st.none() | st.builds(per_stage, st.just(times))),
        draw(st.none() | st.builds(per_stage, st.just(sizes))),
        draw(st.none() | st.builds(per_stage, st.just(kept))),
        draw(st.sampled_from([0.0, 0.1, 0.5, 3.0])),
    )
    layouts = layouts_of_stages(ranks, costs)
    least = min(max(layout.least_memory) for layout in layouts)
    limit = draw(st.none() | st.sampled_from([1, 1.5, 2, ranks]).map(lambda k: k * least or 1.0))
    return layouts, draw(st.integers(1, 8)), limit


def _check(found, limit):
    """The rules of plans, those of this package, and the limit."""
    plan, timeline = validate(found.plan), found.timeline
    validate(lower(plan))
    validate_meeting(lower(plan, ahead=max(map(len, plan.programs))))
    assert timeline == simulate(plan, found.layout.costs)
    assert max(timeline.peak) <= (math.inf if limit is None else limit) * (1 + 1e-9)
    for kinds in ("F", "BI", "BW"):
        for stage, rank in enumerate(plan.rank_of_stage):
            steps = [step for step in plan.programs[rank] if step.stage == stage]
            order = [step.microbatch for step in steps if step.kind.value in kinds]
            assert order == list(range(plan.num_microbatches)), (kinds, stage)


@given(pipelines(), st.sampled_from(["makespan", "span"]))
@settings(deadline=None, max_examples=60)
def test_what_is_found_is_right_keeps_the_limit_and_is_no_worse_than_any_name(case, objective):
    layouts, num_microbatches, limit = case
    found = synthesize(layouts, num_microbatches, limit, objective=objective, effort=QUICK)
    _check(found, limit)
    reached = getattr(found.timeline, objective)
    assert reached >= found.bound * (1 - 1e-9)
    for layout in layouts:
        sizes = Sizes(layout.num_ranks, num_microbatches, layout.chunks)
        for name, family in SCHEDULES.items():
            if family.refuses(sizes) is None:
                plan = build_plan(name, *sizes)
                if plan.rank_of_stage == layout.rank_of_stage:
                    timeline = simulate(plan, layout.costs)
                    if limit is None or max(timeline.peak) <= limit:
                        assert reached <= getattr(timeline, objective) * (1 + 1e-9) + 1e-12


def _golden(rows):
    return [pytest.param(row, id="p{p}-m{m}-{cost}-{memory_limit}".format_map(row)) for row in rows]


def _check_mark(row):
    """Never longer than what is published; what it is longer than the best known, as a share."""
    costs = ShareCosts(*GOLDEN["costs"][row["cost"]])
    found = synthesize(layouts_of_shares(row["p"], costs), row["m"], row["memory_limit"])
    _check(found, row["memory_limit"])
    assert found.timeline.makespan <= row["best_published"] + 1e-9
    return found.timeline.makespan / row["best_known"] - 1


QUICK_ROWS = [
    row
    for row in GOLDEN["auto"]
    if (row["p"] == 2 and row["m"] < 8) or (row["p"], row["m"], row["cost"]) == (4, 8, "real")
]


@pytest.mark.parametrize("row", _golden(QUICK_ROWS))
def test_small_marks_are_met(row):
    assert _check_mark(row) <= 0.01


@pytest.mark.sweep
def test_all_marks_are_met():
    gaps = [_check_mark(row) for row in GOLDEN["auto"]]
    assert sum(gaps) / len(gaps) <= 0.0
    assert max(gaps) <= 0.01


@pytest.mark.sweep
@pytest.mark.parametrize(("pp_size", "num_microbatches", "seconds"), [(8, 32, 10), (16, 64, 60)])
@pytest.mark.parametrize("share", [0.5, 1, 2])
def test_large_pipelines_do_not_take_long(pp_size, num_microbatches, seconds, share):
    began = time.process_time()
    synthesize(layouts_of_shares(pp_size, REAL), num_microbatches, share * pp_size, seconds=None)
    assert time.process_time() - began < seconds


# Half of the memory of 1F1B, where no schedule that is known by name keeps its ranks in step.
def test_where_memory_is_tight_no_name_comes_near():
    layouts = layouts_of_shares(6, REAL, [2])
    limit = 3
    found = synthesize(layouts, 12, limit, effort=0.2)
    named = [
        timeline.makespan
        for name in SCHEDULES
        if SCHEDULES[name].chunks in (None, 2)
        if max((timeline := _share_timeline(build_plan(name, 6, 12, 2))).peak) <= limit
    ]
    assert named
    assert found.timeline.makespan < 0.9 * min(named)


def _share_timeline(plan):
    return simulate(plan, CostModel.shared(plan.rank_of_stage, *REAL))


def test_one_micro_batch_at_a_time_is_the_least_and_enough():
    found = synthesize(layouts_of_shares(3, REAL), 4, 1.0, effort=QUICK)
    _check(found, 1.0)
    assert found.timeline.makespan < _share_timeline(build_plan("sequential", 3, 4)).makespan


def test_each_rank_can_have_its_own_limit():
    limits = (3.0, 1.0, 2.0)
    found = synthesize(layouts_of_shares(3, REAL), 6, limits, effort=QUICK)
    _check(found, None)
    peak = found.timeline.peak
    assert all(held <= limit + 1e-9 for held, limit in zip(peak, limits, strict=True))


def test_whole_backwards_are_used_where_halves_would_hold_too_much():
    # Activation checkpointing: between I and W ten times as much is held as after F.
    costs = CostModel((1.0,) * 4, (1.5,) * 4, (0.5,) * 4, kept=(10.0,) * 4, message=0.1)
    layouts = layouts_of_stages(4, costs)
    tight, roomy = (synthesize(layouts, 8, limit, effort=0.1) for limit in (4.0, 100.0))
    _check(tight, 4.0)
    assert {step.kind for step in tight.plan.steps()} == {Kind.FORWARD, Kind.BACKWARD}
    assert roomy.timeline.makespan < tight.timeline.makespan
    assert Kind.BACKWARD_WEIGHT in {step.kind for step in roomy.plan.steps()}
    some = synthesize(layouts, 8, 16.0, effort=0.2)
    _check(some, 16.0)
    assert {step.kind for step in some.plan.steps()} == {*Kind} - {k for k in Kind if k.is_message}


def test_the_same_input_gives_the_same_plan_in_any_process():
    code = (
        "from pipemega.pipeline.synthesis import *\n"
        "from pipemega.pipeline.schedules import ShareCosts\n"
        "layouts = layouts_of_shares(3, ShareCosts(1, 1.2, .8, .1))\n"
        "print(synthesize(layouts, 5, 2, effort=.02).plan.to_json())"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1


def test_a_search_whose_time_is_up_gives_the_best_so_far():
    found = synthesize(layouts_of_shares(4, REAL), 8, 4, seconds=0.0)
    _check(found, 4)
    assert found.source == "zb-v"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0.5), "a memory limit of 0.5 is too little for rank 0: whatever the plan, it holds "
         "one micro-batch at all of its stages, 1; the least limit that would do for all ranks is "
         "1"),
        ((4, (2.0, 0.25)), "a memory limit of 0.25 is too little for rank 1"),
        ((4, (1.0, 1.0, 1.0)), "3 memory limits for 2 pipeline ranks: give one for all, or each"),
        ((4, float("nan")), "the memory limit is nan: it is a number above 0"),
        ((4, -1.0), "the memory limit is -1.0: it is a number above 0"),
        ((0, 2.0), "a schedule for 0 micro-batches: give at least 1"),
    ],
)  # fmt: skip
def test_a_limit_or_size_that_is_none_is_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        synthesize(layouts_of_shares(2, REAL), *arguments)


def test_an_objective_that_is_none_is_refused():
    with pytest.raises(ScheduleError, match="objective 'speed': it is 'makespan' or 'span'"):
        synthesize(layouts_of_shares(2, REAL), 2, objective="speed")


def test_layouts_for_different_numbers_of_ranks_are_refused():
    layouts = layouts_of_shares(2, REAL) + layouts_of_shares(3, REAL)
    with pytest.raises(ScheduleError, match=r"layouts for \[2, 3\] pipeline ranks"):
        synthesize(layouts, 2)
    with pytest.raises(ScheduleError, match=r"layouts for \[\] pipeline ranks"):
        synthesize([], 2)


# Layouts


def test_shares_lie_in_loops_and_in_vs():
    places = [layout.rank_of_stage for layout in layouts_of_shares(3, REAL, (2, 1))]
    assert places == [loop(3), loop(3, 2), v(3, 2)]
    assert [layout.rank_of_stage for layout in layouts_of_shares(1, REAL)] == [(0,)]


def test_stages_lie_in_a_loop_and_in_a_v_where_it_turns():
    assert [x.rank_of_stage for x in layouts_of_stages(2, CostModel.uniform(2))] == [(0, 1)]
    places = [x.rank_of_stage for x in layouts_of_stages(2, CostModel.uniform(8))]
    assert places == [loop(2, 4), v(2, 4)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layouts_of_stages(2, CostModel.uniform(3)), "3 stages do not divide among 2"),
        (lambda: layouts_of_stages(0, CostModel.uniform(3)), "3 stages do not divide among 0"),
        (lambda: layouts_of_shares(0, REAL), "layouts for 0 pipeline ranks: give at least 1"),
        (lambda: layouts_of_shares(2, REAL, (0,)), "layouts for 0 chunks: give at least 1"),
        (lambda: Layout((0, 1), CostModel.uniform(3)), "a layout of 2 stages, and costs of 3"),
        (lambda: Layout((0, 2), CostModel.uniform(2)), r"rank_of_stage is \[0, 2\]: number the"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


# The tools


@given(pipelines(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_clock_of_the_search_is_that_of_the_simulation(case, rng):
    layouts, num_microbatches, limit = case
    layout = rng.choice([one for one in layouts if limit is None or max(one.least_memory) <= limit])
    problem = Problem.of(layout, num_microbatches, [limit or math.inf] * layout.num_ranks)
    policy = Policy.drawn(problem, rng)
    run = play(problem, construct(problem, policy))
    better = anneal(run, 100, 0.3, makespan, rng.randrange(100))
    assert makespan(better) <= makespan(run) + 1e-9
    # What was played in pieces is what is played at once, and what is simulated.
    assert play(problem, better.orders).start == better.start
    plan = problem.plan_of("x", better.orders)
    assert problem.orders_of(plan) == better.orders
    timeline = simulate(plan, layout.costs)
    assert timeline.makespan == pytest.approx(makespan(better) * problem.time_unit)
    assert problem.fits(better.orders) is True


def test_a_critical_path_is_of_steps_that_wait_for_the_one_before():
    (layout,) = layouts_of_shares(2, ShareCosts(), [1])
    problem = Problem.of(layout, 2, [9.0, 9.0])
    # rank 0   F0 F1 .. I0 W0 I1 W1
    # rank 1   .. F0 I0 F1 I1 W0 W1
    run = play(problem, [[0, 0, 2, 4, 2, 4], [1, 3, 1, 3, 5, 5]])
    steps = {step for seed in range(50) for step in critical_path(run, random.Random(seed))}
    assert steps == {(0, 5), (0, 4), (0, 3), (1, 5), (1, 4), (1, 3), (1, 2), (1, 1)}


def test_a_bound_without_memory_is_that_of_the_literature():
    for chunks in (1, 2, 4):
        for layout in layouts_of_shares(8, REAL, [chunks]):
            problem = Problem.of(layout, 32, [math.inf] * 8)
            floor = 32 * REAL.work + 7 * (REAL.forward / chunks + REAL.message)
            assert least_makespan(problem) * problem.time_unit == pytest.approx(floor)


@pytest.mark.parametrize(
    ("pp_size", "num_microbatches", "limit", "chunks", "costs"),
    [
        (3, 4, 2.0, 1, ShareCosts(1, 1, 1, 0.5)),
        (2, 4, 1.5, 2, REAL),
        (3, 3, 2.0, 2, REAL),
    ],
)
def test_small_plans_are_as_short_as_any_can_be(pp_size, num_microbatches, limit, chunks, costs):
    pytest.importorskip("ortools", reason="OR-tools, the optional exact solver, is not installed")
    layout = layouts_of_shares(pp_size, costs, [chunks])[-1]
    found = synthesize([layout], num_microbatches, limit)
    proof = solve(layout, num_microbatches, [limit] * pp_size, longest=found.timeline.makespan)
    assert proof.bound == pytest.approx(proof.makespan)
    assert found.timeline.makespan == pytest.approx(proof.makespan)
    assert found.bound <= proof.makespan + 1e-9


def test_a_proof_keeps_the_plan_or_brings_a_shorter_one():
    pytest.importorskip("ortools", reason="OR-tools, the optional exact solver, is not installed")
    (layout,) = layouts_of_shares(2, REAL, [1])
    best = synthesize([layout], 4, 2.0)
    proven = prove(best, 2.0)
    assert proven.timeline.makespan == pytest.approx(best.timeline.makespan)
    assert proven.source.endswith(", proven")
    worse = replace(best, timeline=simulate(build_plan("1f1b", 2, 4), layout.costs))
    better = prove(worse, 2.0)
    assert better.timeline.makespan == pytest.approx(best.timeline.makespan)
    assert better.source == "CP-SAT, proven"
    validate(lower(better.plan))
    assert max(better.timeline.peak) <= 2.0


def test_without_the_solver_a_proof_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    (layout,) = layouts_of_shares(2, REAL, [1])
    with pytest.raises(ScheduleError, match=r"pip install 'pipemega\[solver\]'"):
        prove(synthesize([layout], 2), seconds=1.0)


def test_the_exact_search_says_what_it_does_not_know():
    pytest.importorskip("ortools", reason="OR-tools, the optional exact solver, is not installed")
    kept = CostModel((1.0,), (1.0,), (1.0,), kept=(2.0,))
    with pytest.raises(ScheduleError, match="knows backwards in halves alone"):
        solve(Layout((0,), kept), 1, [3.0])
    odd = CostModel((math.pi,), (1.0,), (1.0,))
    with pytest.raises(ScheduleError, match="the exact search counts in whole numbers"):
        solve(Layout((0,), odd), 1, [3.0])
