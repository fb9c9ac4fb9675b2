"""The clock of a stream, with fake events."""

from pipemega.distributed.device_waits import StreamClock


class Stream:
    """Event n occurs at n ms; the host clock, in ns, is 500 ms ahead and advances by waiting."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.host = 0

    def record(self, *, timing: bool) -> "Event":
        assert timing
        self.milliseconds += 1.0
        return Event(self, self.milliseconds)


class Event:
    def __init__(self, stream: Stream, at: float) -> None:
        self.stream, self.at = stream, at

    def query(self) -> bool:
        return self.stream.host >= (self.at + 500) * 1e6

    def synchronize(self) -> None:
        self.stream.host = max(self.stream.host, round((self.at + 500) * 1e6))

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_instants_have_the_times_of_the_host_clock() -> None:
    stream = Stream()
    clock = StreamClock(lambda: stream.host, stream.record)
    instants = [clock.now() for _ in range(3)]
    assert not clock.passed(instants[0])
    assert stream.host == 0
    assert clock.times(instants) == [501_000_000, 502_000_000, 503_000_000]
    assert clock.passed(instants[-1])


def test_durations_wait_only_for_their_last_end() -> None:
    stream = Stream()
    clock = StreamClock(lambda: stream.host, stream.record)
    a, b, c = clock.now(), clock.now(), clock.now()
    assert clock.durations([]) == []
    assert clock.durations([(a, a), (a, b)]) == [0, 1_000_000]
    assert not clock.passed(c)
