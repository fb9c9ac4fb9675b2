"""Recorders: measure when each instruction of one rank has its inputs and when it ends.

    end of the previous one ....... ready ---------------- end
                             waits          executes

On a CPU the host clock is read. On CUDA events are recorded in the stream and read once, after the
step: the host never waits for the device during the step, and the times are those of the device.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

Clock = Callable[[], int]  # nanoseconds, monotonic
MemoryMeter = Callable[[], int]  # bytes in use


@dataclass(frozen=True)
class InstructionTimes:
    """Times of the instructions of one step on one rank, in nanoseconds of its clock.

    Args:
        began: start of the first instruction.
        ready, end: for each instruction of the program. `ready` is when its inputs were received;
            if it waited for none, the end of the previous instruction.
        memory: bytes in use before the first and after each instruction; empty if not recorded.
    """

    began: int
    ready: tuple[int, ...]
    end: tuple[int, ...]
    memory: tuple[int, ...] = ()


class Recorder:
    """Base class; records nothing."""

    def begin(self) -> None:
        """Start a step; discard earlier times."""

    def ready(self) -> None:
        """Record that the current instruction has its inputs and starts to execute."""

    def end(self) -> None:
        """Record that the current instruction has ended."""

    def marks(self) -> InstructionTimes | None:
        """Return the recorded times; call once, after the step."""
        return None

    def seconds(self) -> float:
        """Return the total execution time of the instructions; 0 if not recorded."""
        return 0.0


NULL_RECORDER = Recorder()


class ClockRecorder(Recorder):
    """Records by the host clock, for devices whose work is done when the call returns.

    Args:
        meter: returns the memory in use; None records no memory.
    """

    def __init__(self, meter: MemoryMeter | None = None, clock: Clock = perf_counter_ns) -> None:
        self._clock, self._meter = clock, meter

    def begin(self) -> None:
        self._ready: list[int] = []
        self._end: list[int] = []
        self._memory: list[int] = []
        self._sample_memory()
        self._began = self._at = self._clock()

    def ready(self) -> None:
        self._at = self._clock()

    def end(self) -> None:
        self._ready.append(self._at)
        self._at = self._clock()
        self._end.append(self._at)
        if self._meter is not None:
            self._sample_memory()
            # The time of the memory sample does not belong to the next instruction.
            self._at = self._clock()

    def _sample_memory(self) -> None:
        if self._meter is not None:
            self._memory.append(self._meter())

    def marks(self) -> InstructionTimes:
        ready, end = tuple(self._ready), tuple(self._end)
        return InstructionTimes(self._began, ready, end, tuple(self._memory))


class EventRecorder(Recorder):
    """Records by CUDA events in the current stream.

    The device is synchronized once, before the first instruction, to convert event times to the
    host clock.
    """

    def __init__(
        self, device: torch.device, record_memory: bool = False, clock: Clock = perf_counter_ns
    ) -> None:
        self._device, self._record_memory, self._clock = device, record_memory, clock

    def begin(self) -> None:
        self._ready: list[torch.cuda.Event] = []
        self._end: list[torch.cuda.Event] = []
        self._memory: list[int] = []
        torch.cuda.synchronize(self._device)
        self._sample_memory()
        self._began = self._clock()
        self._first = self._at = _now()

    def ready(self) -> None:
        self._at = _now()

    def end(self) -> None:
        self._ready.append(self._at)
        self._at = _now()
        self._end.append(self._at)
        self._sample_memory()

    def _sample_memory(self) -> None:
        """Sample the allocated bytes of the caching allocator, without synchronization."""
        if self._record_memory:
            stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
            self._memory.append(stats["allocated_bytes"]["all"]["current"])

    def marks(self) -> InstructionTimes:
        self._at.synchronize()
        ready, end = (tuple(map(self._time, events)) for events in (self._ready, self._end))
        return InstructionTimes(self._began, ready, end, tuple(self._memory))

    def _time(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._first.elapsed_time(event)
        return self._began + round(milliseconds * 1e6)


class BusyTimeRecorder(Recorder):
    """Records the total execution time of the instructions; cheap enough for every step.

    On CUDA by events, without synchronization during the step.
    """

    def __init__(self, device: torch.device, clock: Clock = perf_counter_ns) -> None:
        self._clock = clock
        self._on_device = device.type == "cuda"
        self._nanoseconds = 0
        self._at = 0
        self._began: Any = None
        self._events: list[tuple[Any, Any]] = []
        self._previous: list[tuple[Any, Any]] = []  # events of the previous step

    def begin(self) -> None:
        self._nanoseconds = 0
        self._previous, self._events = self._events, []
        self.ready()

    def ready(self) -> None:
        if self._on_device:
            self._began = _now()
        else:
            self._at = self._clock()

    def end(self) -> None:
        began, at = self._began, self._at
        self.ready()
        if self._on_device:
            self._events.append((began, self._began))
        else:
            self._nanoseconds += self._at - at

    def seconds(self) -> float:
        """Return the time of the last step; on CUDA of the step before, which has completed."""
        if self._previous:
            self._previous[-1][1].synchronize()
            milliseconds = sum(began.elapsed_time(ended) for began, ended in self._previous)
            self._nanoseconds = round(milliseconds * 1e6)
            self._previous = []
        return self._nanoseconds * 1e-9


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def make_recorder(
    device: torch.device, record_memory: bool = False, clock: Clock = perf_counter_ns
) -> Recorder:
    """Return a recorder of one step on `device`.

    Args:
        record_memory: also record the memory in use, if the platform supports it.
    """
    if device.type == "cuda":
        return EventRecorder(device, record_memory, clock)
    return ClockRecorder(process_memory_meter() if record_memory else None, clock)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def process_memory_meter() -> MemoryMeter | None:
    """Return a meter of the bytes allocated by this process, from glibc >= 2.33; else None.

    It counts all allocations of the process. The change during an instruction is the memory of
    its tensors, apart from allocations by other threads. A call walks all free chunks, which
    takes up to about 0.1 ms.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo

    def bytes_in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return bytes_in_use
