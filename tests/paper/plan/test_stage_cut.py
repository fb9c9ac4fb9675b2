"""The cut of a model by the simulated time of a plan, from given costs of layers."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.partition import Cut, LayerCosts, LayerMoves, best_cut, limit_error
from pipemega.pipeline.plan.simulate import CostModel, CostReplay, simulate
from pipemega.pipeline.schedules import SCHEDULES, Sizes, build_plan, forward_only
from pipemega.planning.prediction import measured_layers


def layers(times, held=None):
    """Return layers whose F, I and W take the same time."""
    times = tuple(map(float, times))
    held = times if held is None else tuple(map(float, held))
    both = tuple(2 * t for t in times)
    return LayerCosts(times, times, times, both, held, tuple(h / 2 for h in held))


HEAD_AT_THE_END = layers([0.1, 1, 1, 1, 1, 1, 1, 1, 1, 0.02, 2.9])


def test_a_replay_has_the_times_and_the_memory_of_a_simulation():
    rng = random.Random(7)
    for name, family in SCHEDULES.items():
        plan = family.plan(Sizes(2, 6, family.default_chunks))
        for one in (plan, forward_only(plan.rank_of_stage, 6)):
            replay, count = CostReplay(one), plan.num_stages
            for message in (0.0, 0.3):
                numbers = [tuple(rng.random() for _ in range(count)) for _ in range(6)]
                costs = CostModel(*numbers, message=message)
                known = simulate(one, costs)
                assert replay.makespan(costs) == known.makespan, name
                assert replay.peak(costs) == pytest.approx(max(known.peak), abs=1e-12), name


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved"])
def test_no_other_cut_of_a_small_model_is_faster(name):
    plan = build_plan(name, 2, 6)
    rng = random.Random(name)
    for _ in range(3):
        model = layers([rng.choice((0, 0.1, 1, 1, 3)) for _ in range(8)])
        found = best_cut(plan, model)
        inner = itertools.combinations(range(1, 8), plan.num_stages - 1)
        shortest = min(Cut.of((0, *b, 8), plan, model).timeline.makespan for b in inner)
        assert found.timeline.makespan == pytest.approx(shortest)


def test_the_head_counts_by_its_time():
    # Eight blocks and a head of 2.9 blocks: 5 blocks before the cut, 3 blocks and the head after.
    assert best_cut(build_plan("1f1b", 2, 8), HEAD_AT_THE_END).bounds == (0, 6, 11)


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 8, 1), ("interleaved", 4, 3)])
def test_a_search_is_never_slower_than_the_cuts_it_starts_from(name, ranks, chunks):
    rng = random.Random(3)
    plan = build_plan(name, ranks, 16, chunks)
    model = layers([rng.random() ** 3 for _ in range(40)])
    starts = [(0, *sorted(rng.sample(range(1, 40), plan.num_stages - 1)), 40) for _ in range(5)]
    found = best_cut(plan, model, starts=starts)
    even = LayerMoves(plan.rank_of_stage, model.total).even_cuts()
    for bounds in (*starts, *even):
        assert found.timeline.makespan <= Cut.of(bounds, plan, model).timeline.makespan
    assert found.bounds == best_cut(plan, model, starts=starts).bounds


def test_ranks_with_several_stages_get_even_work():
    # Even stages need not give even ranks: stages 0 and 3 are on rank 0.
    plan, rng, better = build_plan("zb-v", 2, 8), random.Random(1), 0
    for _ in range(10):
        model = layers([rng.random() for _ in range(14)])
        cuts = LayerMoves(plan.rank_of_stage, model.total).even_cuts()
        stages, ranks = (Cut.of(bounds, plan, model).imbalance for bounds in cuts)
        assert ranks <= stages + 1e-9
        better += ranks < 0.9 * stages
    assert better >= 3


def test_stages_start_at_the_splits_of_the_model():
    plan = build_plan("1f1b", 2, 8)
    assert best_cut(plan, HEAD_AT_THE_END, splits=[3, 9]).bounds in {(0, 3, 11), (0, 9, 11)}
    four = build_plan("1f1b", 4, 8)
    assert {3, 9} <= set(best_cut(four, HEAD_AT_THE_END, splits=[3, 9]).bounds)


def test_a_limit_of_memory_moves_layers_or_names_what_is_needed():
    plan = build_plan("1f1b", 2, 8)  # rank 0 holds two micro-batches
    model = layers([1] * 8, held=[5, 1, 1, 1, 1, 1, 1, 1])
    free = best_cut(plan, model)
    assert (free.bounds, free.peak) == ((0, 4, 8), 16.0)
    assert best_cut(plan, model, limit=14.0).bounds == (0, 3, 8)
    closest = best_cut(plan, model, limit=3.0)
    least = min(Cut.of((0, b, 8), plan, model).peak for b in range(1, 8))
    assert closest.peak == least == 10.0
    error = limit_error(closest, 3.0)
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "pipeline.memory_limit (3): schedule '1f1b' holds at least 10 bytes of activations on its "
        "fullest rank, with the best cut for memory that was found ([0, 1, 8]): set "
        "pipeline.memory_limit to 10 or more, choose a schedule with less memory, or recompute "
        "activations"
    )


def test_a_cut_for_evaluation_counts_forwards_only():
    # The forward of the first layer is long, its backward short.
    model = LayerCosts((4, 1, 1, 1), (0, 2, 2, 2), (0,) * 4, (0, 2, 2, 2), (1,) * 4, (1,) * 4)
    assert best_cut(build_plan("1f1b", 2, 8), model).bounds == (0, 2, 4)
    assert best_cut(forward_only((0, 1), 8), model).bounds == (0, 1, 4)


def test_64_stages_and_512_micro_batches_are_cut_in_seconds():
    plan = build_plan("1f1b", 64, 512)
    model = layers([0.1, *[1] * 126, 0.02, 2.9])
    started = time.process_time()
    found = best_cut(plan, model)
    assert time.process_time() - started < 6
    assert len(found.bounds) == 65


def test_measured_stages_give_the_times_of_their_layers():
    counted = layers([1, 3, 2, 2])
    costs = CostModel((8.0, 2.0), (4.0, 1.0), (4.0, 3.0), backward=(10.0, 4.0), message=0.5)
    found = measured_layers(counted, (0, 2, 4), costs, split=True)
    # Nothing shows how a stage divides its time among its layers: as counted.
    assert found.forward == pytest.approx((2.0, 6.0, 1.0, 1.0))
    assert found.backward_weight == pytest.approx((1.0, 3.0, 1.5, 1.5))
    assert found.held == counted.held
    assert found.message == 0.5
    whole = measured_layers(counted, (0, 2, 4), costs, split=False)
    # The counted halves of B are equal.
    assert whole.backward_input == pytest.approx((1.25, 3.75, 1.0, 1.0))
    assert whole.backward_weight == pytest.approx(whole.backward_input)


@pytest.mark.parametrize("bounds", [(0, 5, 10), (0, 6, 10), (0, 2, 5, 8, 10)], ids=str)
def test_stages_of_blocks_show_how_much_of_the_last_stage_is_the_head(bounds):
    # The head takes 1.5 times as long as counted.
    counted, real = (layers([0.02, *[1] * 8, head]) for head in (2.0, 3.0))
    found = measured_layers(counted, bounds, real.cost_model(bounds), split=True)
    assert found.forward == pytest.approx(real.forward, rel=0.04, abs=0.01)
    assert found.cost_model(bounds).forward == pytest.approx(real.cost_model(bounds).forward)
    # What each instruction takes beyond its layers is not divided among them.
    slow, real_slow = (replace(model, instruction=0.1) for model in (counted, real))
    found = measured_layers(slow, bounds, real_slow.cost_model(bounds), split=True)
    assert found.instruction == pytest.approx(0.1)
    assert found.forward == pytest.approx(real.forward, rel=0.04, abs=0.01)
    # No negative time, whatever was measured.
    odd = CostModel(*[(9.0, *[0.1] * (len(bounds) - 2))] * 3)
    assert min(measured_layers(counted, bounds, odd, split=True).forward) > 0
