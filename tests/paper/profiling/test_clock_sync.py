"""Clock offsets from barriers."""

from hypothesis import given
from hypothesis import strategies as st

from pipemega.profiling.step_trace import ClockSample, clock_offset

_TIMES = st.integers(0, 10**6)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(_TIMES, _TIMES, _TIMES, _TIMES), min_size=1, max_size=8),
)
def test_the_offset_is_within_its_error_of_the_true_one(ahead, delays):
    ours, theirs, now = [], [], 0
    for our_enter, their_enter, our_leave, their_leave in delays:
        enter = (now + our_enter, now + their_enter)
        released = max(enter)
        leave = (released + our_leave, released + their_leave)
        ours.append(ClockSample(enter[0], leave[0]))
        theirs.append(ClockSample(enter[1] + ahead, leave[1] + ahead))
        now = max(leave)
    found, error = clock_offset(ours, theirs)
    assert abs(found - ahead) <= error + 1e-6


def test_one_short_barrier_among_long_ones_gives_an_exact_offset():
    long = [(ClockSample(t, t + 1000), ClockSample(t + 50, t + 1050)) for t in (0, 2000)]
    short = (ClockSample(5000, 5010), ClockSample(5052, 5060))
    ours, theirs = zip(*long, short, strict=True)
    assert clock_offset(ours[:2], theirs[:2]) == (50.0, 1000.0)
    found, error = clock_offset(ours, theirs)
    assert error <= 10
    assert abs(found - 50) <= error
