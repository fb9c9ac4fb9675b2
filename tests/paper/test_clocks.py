"""Clocks brought together by meetings."""

from hypothesis import given
from hypothesis import strategies as st

from pipemega.pipeline.clocks import Meeting, offset

_TIMES = st.integers(0, 10**6)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(_TIMES, _TIMES, _TIMES, _TIMES), min_size=1, max_size=8),
)
def test_the_offset_is_within_its_error_of_the_true_one(ahead, delays):
    ours, theirs, now = [], [], 0
    for one_comes, other_comes, one_leaves, other_leaves in delays:
        come = (now + one_comes, now + other_comes)
        met = max(come)
        left = (met + one_leaves, met + other_leaves)
        ours.append(Meeting(come[0], left[0]))
        theirs.append(Meeting(come[1] + ahead, left[1] + ahead))
        now = max(left)
    found, error = offset(ours, theirs)
    assert abs(found - ahead) <= error + 1e-6


def test_one_quick_meeting_among_slow_ones_makes_it_exact():
    slow = [(Meeting(t, t + 1000), Meeting(t + 50, t + 1050)) for t in (0, 2000)]
    quick = (Meeting(5000, 5010), Meeting(5052, 5060))
    ours, theirs = zip(*slow, quick, strict=True)
    assert offset(ours[:2], theirs[:2]) == (50.0, 1000.0)
    found, error = offset(ours, theirs)
    assert error <= 10
    assert abs(found - 50) <= error
