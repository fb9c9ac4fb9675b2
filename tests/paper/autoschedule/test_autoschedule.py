"""Tests of schedule `auto`: valid plans within the memory limit, at least as good as named ones."""

import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule import (
    Placement,
    find_plan,
    placements_of_rank_costs,
    placements_of_stage_costs,
)
from pipemega.pipeline.autoschedule.anneal import anneal, critical_path
from pipemega.pipeline.autoschedule.greedy import PriorityRule, construct, makespan, replay_all
from pipemega.pipeline.autoschedule.problem import Problem, least_makespan
from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan.validate import validate, validate_messages
from pipemega.pipeline.schedules import SCHEDULES, RankCosts, Sizes, build_plan
from pipemega.pipeline.schedules.building_blocks import loop, v
from tests.paper.autoschedule.exact import solve

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "schedules.json").read_text())
REAL = RankCosts(1.0, 1.2, 0.8, 0.1)
# Fraction of the default effort.
QUICK = 0.01


@st.composite
def pipelines(draw):
    """Return placements of unequal stages, micro-batches, and a feasible limit or None."""
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
    placements = placements_of_stage_costs(ranks, costs)
    least = min(max(placement.least_memory) for placement in placements)
    limit = draw(st.none() | st.sampled_from([1, 1.5, 2, ranks]).map(lambda k: k * least or 1.0))
    return placements, draw(st.integers(1, 8)), limit


def _check(found, limit):
    """Check the rules of plans, the order of micro-batches, and the limit."""
    plan, timeline = validate(found.plan), found.timeline
    validate(lower(plan))
    validate_messages(lower(plan), "queues", discards=True)
    assert timeline == simulate(plan, found.placement.costs)
    assert max(timeline.peak) <= (math.inf if limit is None else limit) * (1 + 1e-9)
    for kinds in ("F", "BI", "BW"):
        for stage, rank in enumerate(plan.rank_of_stage):
            steps = [step for step in plan.programs[rank] if step.stage == stage]
            order = [step.microbatch for step in steps if step.kind.value in kinds]
            assert order == list(range(plan.num_microbatches)), (kinds, stage)


@given(pipelines(), st.sampled_from(["makespan", "span"]))
@settings(max_examples=60)
def test_a_found_plan_is_valid_within_the_limit_and_no_worse_than_named_schedules(case, objective):
    placements, num_microbatches, limit = case
    found = find_plan(placements, num_microbatches, limit, objective=objective, effort=QUICK)
    _check(found, limit)
    reached = getattr(found.timeline, objective)
    assert reached >= found.bound * (1 - 1e-9)
    for placement in placements:
        sizes = Sizes(placement.num_ranks, num_microbatches, placement.chunks)
        for name, family in SCHEDULES.items():
            if family.chunks_error(sizes.chunks) is None:
                plan = build_plan(name, *sizes)
                if plan.rank_of_stage == placement.rank_of_stage:
                    timeline = simulate(plan, placement.costs)
                    if limit is None or max(timeline.peak) <= limit:
                        assert reached <= getattr(timeline, objective) * (1 + 1e-9) + 1e-12


def _golden(rows):
    return [pytest.param(row, id="p{p}-m{m}-{cost}-{memory_limit}".format_map(row)) for row in rows]


def _check_golden_row(row):
    """Check the published makespan; return the relative difference to the best known one."""
    costs = RankCosts(*GOLDEN["costs"][row["cost"]])
    found = find_plan(placements_of_rank_costs(row["p"], costs), row["m"], row["memory_limit"])
    _check(found, row["memory_limit"])
    assert found.timeline.makespan <= row["best_published"] + 1e-9
    return found.timeline.makespan / row["best_known"] - 1


QUICK_ROWS = [
    row
    for row in GOLDEN["auto"]
    if (row["p"] == 2 and row["m"] < 8)
    or (row["p"], row["m"], row["cost"], row["memory_limit"]) == (4, 8, "real", 4)
]


@pytest.mark.parametrize("row", _golden(QUICK_ROWS))
def test_small_golden_rows_are_reached(row):
    assert _check_golden_row(row) <= 0.01


@pytest.mark.sweep
def test_all_golden_rows_are_reached():
    gaps = [_check_golden_row(row) for row in GOLDEN["auto"]]
    assert sum(gaps) / len(gaps) <= 0.0
    assert max(gaps) <= 0.01


@pytest.mark.sweep
@pytest.mark.parametrize(("pp_size", "num_microbatches", "seconds"), [(8, 32, 10), (16, 64, 60)])
@pytest.mark.parametrize("share", [0.5, 1, 2])
def test_large_pipelines_are_planned_in_time(pp_size, num_microbatches, seconds, share):
    began = time.process_time()
    find_plan(
        placements_of_rank_costs(pp_size, REAL), num_microbatches, share * pp_size, seconds=None
    )
    assert time.process_time() - began < seconds


# Half of the memory of 1F1B: no named schedule keeps its ranks busy.
def test_with_little_memory_auto_is_10_percent_shorter_than_named_schedules():
    placements = placements_of_rank_costs(6, REAL, [2])
    limit = 3
    found = find_plan(placements, 12, limit, effort=0.2)
    named = [
        timeline.makespan
        for name in SCHEDULES
        if SCHEDULES[name].chunks in (None, 2)
        if max((timeline := _share_timeline(build_plan(name, 6, 12, 2))).peak) <= limit
    ]
    assert named
    assert found.timeline.makespan < 0.9 * min(named)


def _share_timeline(plan):
    return simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage, *REAL))


def test_memory_for_one_micro_batch_is_enough():
    found = find_plan(placements_of_rank_costs(3, REAL), 4, 1.0, effort=QUICK)
    _check(found, 1.0)
    assert found.timeline.makespan < _share_timeline(build_plan("sequential", 3, 4)).makespan


def test_each_rank_can_have_its_own_limit():
    limits = (3.0, 1.0, 2.0)
    found = find_plan(placements_of_rank_costs(3, REAL), 6, limits, effort=QUICK)
    _check(found, None)
    peak = found.timeline.peak
    assert all(held <= limit + 1e-9 for held, limit in zip(peak, limits, strict=True))


def test_whole_backwards_are_used_if_split_backward_needs_too_much_memory():
    # As with activation checkpointing: ten times as much memory between I and W as after F.
    costs = CostModel((1.0,) * 4, (1.5,) * 4, (0.5,) * 4, kept=(10.0,) * 4, message=0.1)
    placements = placements_of_stage_costs(4, costs)
    low, high = (find_plan(placements, 8, limit, effort=0.1) for limit in (4.0, 100.0))
    _check(low, 4.0)
    assert {step.kind for step in low.plan.steps()} == {Kind.FORWARD, Kind.BACKWARD}
    assert high.timeline.makespan < low.timeline.makespan
    assert Kind.BACKWARD_WEIGHT in {step.kind for step in high.plan.steps()}
    some = find_plan(placements, 8, 16.0, effort=0.2)
    _check(some, 16.0)
    halves = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    kinds = {step.kind for step in some.plan.steps()}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD, *halves}


def test_the_same_input_gives_the_same_plan_in_any_process():
    code = (
        "from pipemega.pipeline.autoschedule import *\n"
        "from pipemega.pipeline.schedules import RankCosts\n"
        "placements = placements_of_rank_costs(3, RankCosts(1, 1.2, .8, .1))\n"
        "print(find_plan(placements, 5, 2, effort=.02).plan.to_json())"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1


def test_a_search_without_time_returns_the_best_named_schedule():
    found = find_plan(placements_of_rank_costs(4, REAL), 8, 4, seconds=0.0)
    _check(found, 4)
    assert found.source == "zb-v"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0.5), "a memory limit of 0.5 is too low for rank 0: every plan holds at least one "
         "micro-batch at all of its stages, 1; the lowest limit that is enough for all ranks is 1"),
        ((4, (2.0, 0.25)), "a memory limit of 0.25 is too low for rank 1"),
        ((4, (1.0, 1.0, 1.0)), "3 memory limits for 2 pipeline ranks: give one for all, or one"),
        ((4, float("nan")), "the memory limit is nan: it must be above 0"),
        ((4, -1.0), "the memory limit is -1.0: it must be above 0"),
        ((0, 2.0), "a schedule for 0 micro-batches: give at least 1"),
    ],
)  # fmt: skip
def test_an_invalid_limit_or_size_is_rejected(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        find_plan(placements_of_rank_costs(2, REAL), *arguments)


def test_an_unknown_objective_is_rejected():
    with pytest.raises(ScheduleError, match="objective 'speed': use 'makespan' or 'span'"):
        find_plan(placements_of_rank_costs(2, REAL), 2, objective="speed")


def test_placements_for_different_numbers_of_ranks_are_rejected():
    placements = placements_of_rank_costs(2, REAL) + placements_of_rank_costs(3, REAL)
    with pytest.raises(ScheduleError, match=r"placements for \[2, 3\] pipeline ranks"):
        find_plan(placements, 2)
    with pytest.raises(ScheduleError, match=r"placements for \[\] pipeline ranks"):
        find_plan([], 2)


# Placements


def test_rank_costs_give_loops_and_vs():
    places = [placement.rank_of_stage for placement in placements_of_rank_costs(3, REAL, (2, 1))]
    assert places == [loop(3), loop(3, 2), v(3, 2)]
    assert [placement.rank_of_stage for placement in placements_of_rank_costs(1, REAL)] == [(0,)]


def test_stage_costs_give_a_loop_and_a_v():
    assert [x.rank_of_stage for x in placements_of_stage_costs(2, CostModel.uniform(2))] == [(0, 1)]
    places = [x.rank_of_stage for x in placements_of_stage_costs(2, CostModel.uniform(8))]
    assert places == [loop(2, 4), v(2, 4)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: placements_of_stage_costs(2, CostModel.uniform(3)),
            "3 stages cannot be divided evenly among 2",
        ),
        (
            lambda: placements_of_stage_costs(0, CostModel.uniform(3)),
            "3 stages cannot be divided evenly among 0",
        ),
        (
            lambda: placements_of_rank_costs(0, REAL),
            "placements for 0 pipeline ranks: give at least 1",
        ),
        (
            lambda: placements_of_rank_costs(2, REAL, (0,)),
            "placements for 0 chunks: give at least 1",
        ),
        (
            lambda: Placement((0, 1), CostModel.uniform(3)),
            "the placement has 2 stages and the costs have 3",
        ),
        (lambda: Placement((0, 2), CostModel.uniform(2)), r"rank_of_stage is \[0, 2\]: number the"),
    ],
)
def test_an_invalid_placement_is_rejected(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


# Parts of the search


@given(pipelines(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_replayed_times_equal_the_simulation(case, rng):
    placements, num_microbatches, limit = case
    placement = rng.choice(
        [one for one in placements if limit is None or max(one.least_memory) <= limit]
    )
    problem = Problem.of(placement, num_microbatches, [limit or math.inf] * placement.num_ranks)
    rule = PriorityRule.sample(problem, rng)
    run = replay_all(problem, construct(problem, rule))
    better = anneal(run, 100, 0.3, makespan, rng.randrange(100))
    assert makespan(better) <= makespan(run) + 1e-9
    # A replay of changes equals a replay of the whole, and the simulation.
    assert replay_all(problem, better.orders).start == better.start
    plan = problem.plan_of("x", better.orders)
    assert problem.orders_of(plan) == better.orders
    timeline = simulate(plan, placement.costs)
    assert timeline.makespan == pytest.approx(makespan(better) * problem.time_unit)
    assert problem.fits(better.orders) is True


def test_a_critical_path_has_the_steps_that_wait_for_the_previous_one():
    (placement,) = placements_of_rank_costs(2, RankCosts(), [1])
    problem = Problem.of(placement, 2, [9.0, 9.0])
    # rank 0   F0 F1 .. I0 W0 I1 W1
    # rank 1   .. F0 I0 F1 I1 W0 W1
    run = replay_all(problem, [[0, 0, 2, 4, 2, 4], [1, 3, 1, 3, 5, 5]])
    steps = {step for seed in range(50) for step in critical_path(run, random.Random(seed))}
    assert steps == {(0, 5), (0, 4), (0, 3), (1, 5), (1, 4), (1, 3), (1, 2), (1, 1)}


def test_the_bound_without_a_memory_limit_is_the_published_one():
    for chunks in (1, 2, 4):
        for placement in placements_of_rank_costs(8, REAL, [chunks]):
            problem = Problem.of(placement, 32, [math.inf] * 8)
            expected = 32 * REAL.work + 7 * (REAL.forward / chunks + REAL.message)
            assert least_makespan(problem) * problem.time_unit == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pp_size", "num_microbatches", "limit", "chunks", "costs"),
    [
        (3, 4, 2.0, 1, RankCosts(1, 1, 1, 0.5)),
        (2, 4, 1.5, 2, REAL),
        (3, 3, 2.0, 2, REAL),
    ],
)
def test_small_plans_are_optimal(pp_size, num_microbatches, limit, chunks, costs):
    pytest.importorskip("ortools", reason="OR-tools, the oracle of this test, is not installed")
    placement = placements_of_rank_costs(pp_size, costs, [chunks])[-1]
    found = find_plan([placement], num_microbatches, limit)
    proof = solve(
        placement, num_microbatches, [limit] * pp_size, upper_bound=found.timeline.makespan
    )
    assert proof.bound == pytest.approx(proof.makespan)
    assert found.timeline.makespan == pytest.approx(proof.makespan)
    assert found.bound <= proof.makespan + 1e-9


def test_the_exact_search_rejects_costs_that_it_does_not_support():
    pytest.importorskip("ortools", reason="OR-tools, the oracle of this test, is not installed")
    kept = CostModel((1.0,), (1.0,), (1.0,), kept=(2.0,))
    with pytest.raises(ScheduleError, match="supports only split backward"):
        solve(Placement((0,), kept), 1, [3.0])
    odd = CostModel((math.pi,), (1.0,), (1.0,))
    with pytest.raises(ScheduleError, match="the exact search uses integers"):
        solve(Placement((0,), odd), 1, [3.0])
