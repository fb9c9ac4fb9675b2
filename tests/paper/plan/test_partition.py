"""Tests of the partition of layers into stages."""

import math
import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.errors import ConfigError
from pipemega.pipeline.plan.partition import by_type, explicit, partition, partition_at, uniform

costs_and_parts = st.lists(st.integers(0, 9), min_size=1, max_size=12).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def _sums(costs, bounds):
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]


def _brute_force(costs, num_parts):
    """Return the best partition: least bottleneck, then least squares, then earliest bounds."""
    inner = combinations(range(1, len(costs)), num_parts - 1)
    cuts = [[0, *cut, len(costs)] for cut in inner]
    return min(
        cuts,
        key=lambda cut: (max(_sums(costs, cut)), sum(x * x for x in _sums(costs, cut)), cut),
    )


def _is_a_cut(bounds, num_layers, num_parts):
    rises = all(start < stop for start, stop in pairwise(bounds))
    return rises and (bounds[0], bounds[-1], len(bounds)) == (0, num_layers, num_parts + 1)


@given(costs_and_parts)
@settings(max_examples=150)
def test_the_partition_is_the_best_of_all(drawn):
    costs, num_parts = drawn
    assert partition(costs, num_parts) == _brute_force(costs, num_parts)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.integers(1, 60))
@settings(max_examples=100)
def test_every_layer_is_in_one_stage_and_no_stage_is_empty(costs, num_parts):
    num_parts = min(num_parts, len(costs))
    assert _is_a_cut(partition(costs, num_parts), len(costs), num_parts)
    assert _is_a_cut(uniform(len(costs), num_parts), len(costs), num_parts)


@given(costs_and_parts, st.data())
@settings(max_examples=100)
def test_a_higher_cost_or_fewer_parts_never_lower_the_bottleneck(drawn, data):
    costs, num_parts = drawn
    bottleneck = max(_sums(costs, partition(costs, num_parts)))
    if num_parts > 1:
        assert max(_sums(costs, partition(costs, num_parts - 1))) >= bottleneck
    costs[data.draw(st.integers(0, len(costs) - 1))] += data.draw(st.integers(0, 5))
    assert max(_sums(costs, partition(costs, num_parts))) >= bottleneck


@pytest.mark.parametrize(
    ("costs", "num_parts", "bounds"),
    [
        ([3, 9, 5, 5], 3, [0, 1, 2, 4]),  # where DeepSpeed 0.19 finds a bottleneck of 12
        ([0.1] * 10, 3, [0, 3, 6, 10]),  # tenths do not round into the way
        ([2**60, 1, 2**60 + 1], 2, [0, 2, 3]),  # nor do numbers past those that floats hold
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([5, 0, 0, 5], 2, [0, 1, 4]),
        ([7], 1, [0, 1]),
    ],
)
def test_partitions_checked_by_hand(costs, num_parts, bounds):
    assert partition(costs, num_parts) == bounds


@given(costs_and_parts, st.data())
@settings(max_examples=100)
def test_a_partition_with_splits_is_the_best_that_has_or_joins_them(drawn, data):
    costs, num_parts = drawn
    inside = st.sets(st.integers(1, len(costs) - 1)) if costs[1:] else st.just(set())
    splits = sorted(data.draw(inside))
    bounds = partition_at(costs, splits, num_parts)
    assert _is_a_cut(bounds, len(costs), num_parts)
    inner = set(bounds[1:-1])
    assert inner <= set(splits) or inner >= set(splits)
    allowed = [
        [0, *cut, len(costs)]
        for cut in combinations(range(1, len(costs)), num_parts - 1)
        if set(cut) <= set(splits) or set(cut) >= set(splits)
    ]
    assert max(_sums(costs, bounds)) == min(max(_sums(costs, cut)) for cut in allowed)


def test_splits_hold_for_every_number_of_stages():
    costs = [4, 1, 1, 1, 1, 8]
    assert partition_at(costs, [2, 5], 2) == [0, 5, 6]
    assert partition_at(costs, [2, 5], 3) == [0, 2, 5, 6]
    assert partition_at(costs, [2, 5], 4) == [0, 1, 2, 5, 6]
    assert by_type("b", ["a", "b", "b", "b"], 2, splits=[2]) == [0, 2, 4]


def test_stages_with_a_costly_embedding_or_head_get_fewer_layers():
    layers = [6] + [4] * 8 + [6]
    assert _sums(layers, partition(layers, 4)) == [10, 12, 12, 10]


def test_later_stages_get_the_remainder():
    assert uniform(10, 4) == [0, 2, 4, 7, 10]
    assert uniform(12, 4) == [0, 3, 6, 9, 12]
    assert partition([1] * 10, 4) == uniform(10, 4)


def test_layers_of_a_type_are_divided_evenly_ignoring_case():
    names = ["Embedding", "Block", "Block", "Block", "Block", "LayerNorm", "Head"]
    assert by_type("block", names, 2) == [0, 3, 7]
    assert by_type("block|head", names, 5) == [0, 2, 3, 4, 5, 7]
    assert by_type("^.*$", names, 7) == list(range(8))


def test_explicit_bounds_are_used_unchanged():
    assert explicit((0, 1, 7, 8), 8, 3) == [0, 1, 7, 8]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: partition([1, 1], 3),
            "pipeline.partition: more stages than layers: 2 layers cannot be divided into 3 stages "
            "without an empty one; lower mesh.pipeline to 2 or less, or add layers",
        ),
        (
            lambda: uniform(2, 3),
            "more stages than layers: 2 layers cannot be divided into 3 stages",
        ),
        (lambda: by_type("x", ["x"], 2), "more stages than layers: 1 layers"),
        (lambda: explicit([0, 1, 1], 1, 2), "more stages than layers: 1 layers"),
        (lambda: uniform(2, 0), "pipeline.partition: 0 stages; give at least 1"),
        (
            lambda: partition([1, -1], 1),
            "pipeline.partition: the cost of layer 1 is -1; a cost must be",
        ),
        (lambda: partition([math.nan], 1), "the cost of layer 0 is nan"),
        (
            lambda: by_type("transformer", ["Embedding", "Block", "Block"], 2),
            "pipeline.partition 'type:transformer' matches no layer, but there are 2 "
            "stages; the classes are Embedding, Block: match more of them, or use fewer "
            "stages (mesh.pipeline)",
        ),
        (lambda: by_type("emb", ["Embedding", "Block"], 2), "matches only 1 layers, but there are"),
        (lambda: by_type("(", ["Block"], 1), "pipeline.partition 'type:(' is not a regular expr"),
        (
            lambda: explicit([0, 4], 4, 2),
            "pipeline.partition [0, 4] has 2 bounds, but 2 stages need 3: the first layer of",
        ),
        (
            lambda: explicit([1, 2, 4], 4, 2),
            "pipeline.partition [1, 2, 4] starts at layer 1: begin",
        ),
        (lambda: explicit([0, 2, 3], 4, 2), "ends at 3: the model has 4 layers"),
        (
            lambda: explicit([0, 2, 2, 4], 4, 3),
            "leaves stage 1 without a layer: 2 comes after 2, but bounds must increase",
        ),
    ],
)
def test_invalid_partitions_are_rejected_with_both_numbers(call, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()
