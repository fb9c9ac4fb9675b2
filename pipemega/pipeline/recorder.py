"""When each instruction of one rank began to work and ended, noted while it runs.

    end of the one before ....... ready ---------------- end
                          waits          works

On a CPU by the clock. On CUDA by events in the stream, which are read once, at the end: so the host
never waits for the device in between, and what is timed is what the device did.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Clock = Callable[[], int]  # nanoseconds, never going back
Meter = Callable[[], int]  # bytes in use


@dataclass(frozen=True)
class Marks:
    """What one rank has noted of a step, in nanoseconds of its own clock.

    Args:
        began: when the first instruction began.
        ready, end: of each instruction, in the order of the program. `ready` is when it had what
            it needed; where it waited for nothing, when the one before had ended.
        memory: bytes in use before the first and after each instruction; empty if not known.
    """

    began: int
    ready: tuple[int, ...]
    end: tuple[int, ...]
    memory: tuple[int, ...] = ()


class Recorder:
    """Notes nothing: what a step that is not timed is given."""

    def begin(self) -> None:
        """The step begins, or begins again: what was noted is forgotten."""

    def ready(self) -> None:
        """The instruction under way has what it waited for, and begins to work."""

    def end(self) -> None:
        """The instruction under way is done, and the next one begins."""

    def marks(self) -> Marks | None:
        """All that was noted; once, when the step is over."""
        return None

    def seconds(self) -> float:
        """That the instructions of the step worked, all together; 0 where nobody counts."""
        return 0.0


OFF = Recorder()


class ClockRecorder(Recorder):
    """By the host's clock, for work that is done when the call returns.

    Args:
        meter: None notes no memory.
    """

    def __init__(self, meter: Meter | None = None, clock: Clock = time.perf_counter_ns) -> None:
        self._clock, self._meter = clock, meter

    def begin(self) -> None:
        self._ready: list[int] = []
        self._end: list[int] = []
        self._memory: list[int] = []
        self._weigh()
        self._began = self._at = self._clock()

    def ready(self) -> None:
        self._at = self._clock()

    def end(self) -> None:
        self._ready.append(self._at)
        self._at = self._clock()
        self._end.append(self._at)
        if self._meter is not None:
            self._weigh()
            # So that the weighing is not taken for work of the next instruction.
            self._at = self._clock()

    def _weigh(self) -> None:
        if self._meter is not None:
            self._memory.append(self._meter())

    def marks(self) -> Marks:
        return Marks(self._began, tuple(self._ready), tuple(self._end), tuple(self._memory))


class EventRecorder(Recorder):
    """By CUDA events in the current stream.

    The device and the host are brought together once, before the first instruction, so that the
    device's times can be told by the host's clock.
    """

    def __init__(
        self, device: torch.device, weighs: bool = False, clock: Clock = time.perf_counter_ns
    ) -> None:
        self._device, self._weighs, self._clock = device, weighs, clock

    def begin(self) -> None:
        self._ready: list[torch.cuda.Event] = []
        self._end: list[torch.cuda.Event] = []
        self._memory: list[int] = []
        torch.cuda.synchronize(self._device)
        self._weigh()
        self._began = self._clock()
        self._first = self._at = _now()

    def ready(self) -> None:
        self._at = _now()

    def end(self) -> None:
        self._ready.append(self._at)
        self._at = _now()
        self._end.append(self._at)
        self._weigh()

    def _weigh(self) -> None:
        """What the allocator has handed out; it knows without asking the device."""
        if self._weighs:
            stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
            self._memory.append(stats["allocated_bytes"]["all"]["current"])

    def marks(self) -> Marks:
        self._at.synchronize()
        ready, end = (tuple(map(self._time, events)) for events in (self._ready, self._end))
        return Marks(self._began, ready, end, tuple(self._memory))

    def _time(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._first.elapsed_time(event)
        return self._began + round(milliseconds * 1e6)


class WorkRecorder(Recorder):
    """How long the instructions of a step worked, all together: cheap enough for every step.

    On CUDA by events, which nobody waits for while the step runs.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self._on_device = device.type == "cuda"
        self._nanoseconds = 0
        self._at = 0
        self._began: Any = None
        self._events: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []  # of the step before

    def begin(self) -> None:
        self._nanoseconds = 0
        self._before, self._events = self._events, []
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
        """Of the step that was run last; on CUDA of the one before, which the device has done."""
        if self._before:
            self._before[-1][1].synchronize()
            milliseconds = sum(began.elapsed_time(ended) for began, ended in self._before)
            self._nanoseconds = round(milliseconds * 1e6)
            self._before = []
        return self._nanoseconds * 1e-9


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def recorder_for(
    device: torch.device, weighs: bool = False, clock: Clock = time.perf_counter_ns
) -> Recorder:
    """One for a single step on `device`.

    Args:
        weighs: also note the memory in use, where the machine tells.
    """
    if device.type == "cuda":
        return EventRecorder(device, weighs, clock)
    return ClockRecorder(process_meter() if weighs else None, clock)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def process_meter() -> Meter | None:
    """Bytes that this process has allocated, from glibc (2.33 and later); None without it.

    That is all that the process holds, whatever for; what an instruction adds to it is, but for
    what other threads do meanwhile, the tensors that it leaves. It goes through all free pieces of
    memory, which takes a tenth of a millisecond where there are many.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use
