"""Recorders: measure when each instruction of one rank has its inputs and when it ends.

    end of the previous one ....... ready ---------------- end
                             waits          executes

On a CPU the host clock is read. On CUDA events are recorded in the stream and read once, after the
step: the host never waits for the device during the step, and the times are times of the device.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from pipemega.distributed.device_waits import StreamClock
from pipemega.monitor.timers import HostClock, Interval, StepClock

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
    """Records the times of the instructions of a step.

    Args:
        clock: the clock of the device.
        meter: returns the memory in use; None records no memory.
    """

    def __init__(self, clock: StepClock, meter: MemoryMeter | None = None) -> None:
        self._clock, self._meter = clock, meter

    def begin(self) -> None:
        self._ready: list[Any] = []
        self._end: list[Any] = []
        self._memory: list[int] = []
        self._sample_memory()
        self._began = self._at = self._clock.now()

    def ready(self) -> None:
        self._at = self._clock.now()

    def end(self) -> None:
        self._ready.append(self._at)
        self._at = self._clock.now()
        self._end.append(self._at)
        if self._meter is not None:
            self._sample_memory()
            # The time of the memory sample does not belong to the next instruction.
            self._at = self._clock.now()

    def _sample_memory(self) -> None:
        if self._meter is not None:
            self._memory.append(self._meter())

    def marks(self) -> InstructionTimes:
        began, *times = self._clock.times([self._began, *self._ready, *self._end])
        count = len(self._end)
        memory = tuple(self._memory)
        return InstructionTimes(began, tuple(times[:count]), tuple(times[count:]), memory)


class BusyTimeRecorder(Recorder):
    """Records the total execution time of the instructions; cheap enough for every step."""

    def __init__(self, device: torch.device, clock: StepClock | None = None) -> None:
        self._clock = step_clock(device) if clock is None else clock
        self._on_device = device.type == "cuda"
        self._at: Any = None
        self._intervals: list[Interval] = []
        self._previous: list[Interval] = []  # of the previous step

    def begin(self) -> None:
        self._previous, self._intervals = self._intervals, []
        self.ready()

    def ready(self) -> None:
        self._at = self._clock.now()

    def end(self) -> None:
        began = self._at
        self.ready()
        self._intervals.append((began, self._at))

    def seconds(self) -> float:
        """Return the time of the last step; on CUDA of the step before, which has completed."""
        intervals = self._previous if self._on_device else self._intervals
        return sum(self._clock.durations(intervals)) * 1e-9


def step_clock(device: torch.device, clock: Clock = perf_counter_ns) -> StepClock:
    """Return the clock of the work on `device`.

    Args:
        clock: the clock of the host.
    """
    return StreamClock(clock) if device.type == "cuda" else HostClock(clock)


def make_recorder(
    device: torch.device, record_memory: bool = False, clock: Clock = perf_counter_ns
) -> Recorder:
    """Return a recorder of one step on `device`.

    Args:
        record_memory: also record the memory in use, if the platform supports it.
        clock: the clock of the host.
    """
    meter = None
    if record_memory:
        meter = _cuda_meter(device) if device.type == "cuda" else process_memory_meter()
    return ClockRecorder(step_clock(device, clock), meter)


def _cuda_meter(device: torch.device) -> MemoryMeter:
    """Return a meter of the bytes allocated by the caching allocator; it does not synchronize."""

    def bytes_in_use() -> int:
        stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["current"])

    return bytes_in_use


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
