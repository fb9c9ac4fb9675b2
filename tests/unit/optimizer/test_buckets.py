"""Buckets and their slices: the arithmetic of ZeRO, without tensors."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipemega.optimizer.gradients import ALIGNMENT, aligned, fill_buckets, intersection

SIZES = st.lists(st.integers(0, 1000), max_size=12)
RANKS = st.integers(1, 7)
LIMITS = st.integers(1, 2000)


def test_buckets_read_as_drawn():
    one, two = fill_buckets(
        [5 * 64, 2 * 64 - 1, 4 * 64, 12 * 64], ranks=3, reduce_bucket_size=12 * 64
    )
    assert (one.start, one.stop, one.entries) == (0, 12 * 64, (0, 1, 2))
    assert one.starts == (0, 5 * 64, 7 * 64)
    assert (two.start, two.stop, two.entries) == (12 * 64, 24 * 64, (3,))
    assert [two.owned_by(rank) for rank in range(3)] == [
        (12 * 64, 16 * 64), (16 * 64, 20 * 64), (20 * 64, 24 * 64)
    ]  # fmt: skip


def test_an_entry_above_the_bucket_size_gets_a_separate_bucket():
    buckets = fill_buckets([64, 1000, 64, 64], ranks=2, reduce_bucket_size=256)
    assert [bucket.entries for bucket in buckets] == [(0,), (1,), (2, 3)]


@given(SIZES, RANKS, LIMITS, st.integers(0, 9))
def test_every_entry_is_aligned_in_one_bucket_and_in_order(sizes, ranks, limit, start):
    buckets = fill_buckets(sizes, ranks, limit, start * ALIGNMENT)
    assert [entry for bucket in buckets for entry in bucket.entries] == list(range(len(sizes)))
    at = start * ALIGNMENT
    for bucket in buckets:
        assert bucket.start == at
        for entry, begin in zip(bucket.entries, bucket.starts, strict=True):
            assert begin == at
            assert begin % ALIGNMENT == 0
            at += aligned(sizes[entry])
        assert at <= bucket.stop < at + ranks * ALIGNMENT
        assert len(bucket.entries) == 1 or at - bucket.start <= limit
        at = bucket.stop


@given(SIZES, RANKS, LIMITS)
def test_a_bucket_is_closed_only_if_the_next_entry_would_overfill_it(sizes, ranks, limit):
    for one, other in itertools.pairwise(fill_buckets(sizes, ranks, limit)):
        filled = sum(aligned(sizes[entry]) for entry in one.entries)
        assert filled + aligned(sizes[other.entries[0]]) > limit


@given(SIZES, RANKS, LIMITS)
def test_the_ranks_own_each_element_of_an_entry_once(sizes, ranks, limit):
    for bucket in fill_buckets(sizes, ranks, limit):
        shares = [bucket.owned_by(rank) for rank in range(ranks)]
        assert [start for start, _ in shares] == [
            bucket.start + rank * bucket.share for rank in range(ranks)
        ]
        assert shares[-1][1] == bucket.stop
        assert bucket.share % ALIGNMENT == 0
        for entry, begin in zip(bucket.entries, bucket.starts, strict=True):
            parts = [intersection((begin, begin + sizes[entry]), share) for share in shares]
            held = [element for start, stop in parts for element in range(start, stop)]
            assert held == list(range(begin, begin + sizes[entry]))


def test_the_intersection_of_disjoint_ranges_is_empty():
    assert intersection((0, 5), (3, 9)) == (3, 5)
    assert intersection((0, 5), (5, 9)) == (0, 0)
    assert intersection((7, 8), (0, 3)) == (0, 0)
