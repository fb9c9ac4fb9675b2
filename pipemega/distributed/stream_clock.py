"""A clock of the current CUDA stream."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipemega.distributed.cuda_events import record_event
from pipemega.distributed.device_waits import synchronize


class StreamClock:
    """A `monitor.StepClock`: its instants are events in the current stream.

        host     now()  forward()  now()  ..                        durations([(a, b)])
        stream     a ------ kernels ------ b

    To read the host clock at an event would make the host wait in the middle of a step. The wait
    would include receives that are posted early, whose sender may wait for this rank.

    Args:
        clock: of the host, monotonic, in nanoseconds.
        record: records an event in the current stream, as `record_event`.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        record: Callable[..., Any] = record_event,
    ) -> None:
        self._clock, self.now = clock, partial(record, timing=True)

    def passed(self, instant: Any) -> bool:
        return bool(instant.query())

    def durations(self, intervals: Sequence[tuple[Any, Any]]) -> list[int]:
        if not intervals:
            return []
        synchronize(intervals[-1][1])
        return [_nanoseconds(start, end) for start, end in intervals]

    def times(self, instants: Sequence[Any]) -> list[int]:
        # An event that occurs while the host waits for it relates the two clocks.
        last = self.now()
        synchronize(last)
        at = self._clock()
        return [at - _nanoseconds(instant, last) for instant in instants]


def _nanoseconds(start: Any, end: Any) -> int:
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)
