"""Records the collectives and messages of this process: operation, group, bytes, seconds.

Every call of torch.distributed that moves tensors of a step goes through `recorded`. Without an
active recorder it only makes the call.

    started            wait()       complete
       |---- other work ----|-- waited --|
       |------------ in flight ----------|
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# torch's names of the group of all ranks.
_DEFAULT_GROUP = ("", "undefined", "default_pg")


class Clock(Protocol):
    """Measures work of the device or of the host: a `monitor.StepClock`."""

    def now(self) -> Any: ...

    def durations(self, intervals: Sequence[tuple[Any, Any]]) -> list[int]: ...


class CommKind(NamedTuple):
    """A kind of communication.

    Args:
        name: such as "all_reduce".
        group: the mesh axis, or "world".
        ranks: of the group; 2 for a message.
        nbytes: of the whole tensor: the gathered one, the one that is scattered.
    """

    name: str
    group: str
    ranks: int
    nbytes: int


class Totals(NamedTuple):
    """What one rank recorded of a kind of communication.

    Args:
        calls: how many were started.
        completed: for how many the seconds are known: those that the rank waited for.
        seconds: in flight; the sum.
        waited: seconds of the waits; the sum.
    """

    calls: int
    completed: int
    seconds: float
    waited: float

    def plus(self, other: "Totals") -> "Totals":
        """Return the sums of both."""
        return Totals(
            self.calls + other.calls,
            self.completed + other.completed,
            self.seconds + other.seconds,
            self.waited + other.waited,
        )


NOTHING = Totals(0, 0, 0.0, 0.0)


@dataclass
class _Call:
    kind: CommKind
    clock: Clock
    started: Any
    wait_started: Any = None
    ended: Any = None


@dataclass
class CommRecorder:
    """The calls of this process while the recorder is active.

    Args:
        device, host: clocks of collectives on the device, and of those on the host.
        operations: names of those to record; None: all.
    """

    device: Clock
    host: Clock
    operations: Collection[str] | None = None
    _calls: list[_Call] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        """Return whether to record operations of this name."""
        return self.operations is None or name in self.operations

    def begin(self, kind: CommKind, *, on_host: bool = False) -> _Call:
        """Record the start of a communication."""
        clock = self.host if on_host else self.device
        call = _Call(kind, clock, clock.now())
        self._calls.append(call)
        return call

    def wait_begins(self, call: _Call) -> None:
        """Record that this rank waits from now on."""
        call.wait_started = call.clock.now()

    def ends(self, call: _Call) -> None:
        """Record the end of the communication."""
        call.ended = call.clock.now()

    def totals(self) -> dict[CommKind, Totals]:
        """Return the sums per kind; waits until the device has completed the calls."""
        found = dict.fromkeys((call.kind for call in self._calls), NOTHING)
        for call in self._calls:
            found[call.kind] = found[call.kind].plus(Totals(1, 0, 0.0, 0.0))
        for clock in (self.device, self.host):
            complete = [c for c in self._calls if c.clock is clock and c.ended is not None]
            seconds = clock.durations([(call.started, call.ended) for call in complete])
            waited = clock.durations([(call.wait_started, call.ended) for call in complete])
            for call, total, wait in zip(complete, seconds, waited, strict=True):
                one = Totals(0, 1, total / 1e9, wait / 1e9)
                found[call.kind] = found[call.kind].plus(one)
        return found


_active: CommRecorder | None = None


def record_with(recorder: CommRecorder | None) -> None:
    """Record all calls of this process with `recorder` from now on; None: record none."""
    global _active
    _active = recorder


def recorded(
    name: str,
    nbytes: int,
    group: dist.ProcessGroup | None,
    call: Callable[[], T],
    *,
    ranks: int = 0,
    on_host: bool = False,
) -> T:
    """Call `call`, which starts or runs a communication, and record it.

    Args:
        name, nbytes: see `CommKind`.
        group: the process group; None: all ranks.
        call: returns a `dist.Work`, or a list of them, if the communication is asynchronous; the
            result is waited for in the same way as without recording.
        ranks: that take part; 0: all ranks of the group.
        on_host: the tensors are on the host.
    """
    recorder = _active
    if recorder is None or not recorder.wants(name):
        return call()
    size = ranks or dist.get_world_size(group)
    begun = recorder.begin(CommKind(name, _name_of(group), size, nbytes), on_host=on_host)
    result = call()
    # Not all are a `dist.Work`: see `local_sockets`.
    if hasattr(result, "wait"):
        return _RecordedWork(result, recorder, begun)  # type: ignore[return-value, arg-type]
    if isinstance(result, list):
        *others, last = result
        return [*others, _RecordedWork(last, recorder, begun)]  # type: ignore[return-value]
    if result is None:
        # It was synchronous.
        begun.wait_started = begun.started
        recorder.ends(begun)
    return result


class _RecordedWork:
    """A `dist.Work` whose first wait is recorded."""

    def __init__(self, work: dist.Work, recorder: CommRecorder, call: _Call) -> None:
        self._work, self._recorder, self._call = work, recorder, call

    def wait(self, *timeout: Any) -> bool:
        if self._call.ended is not None:
            return self._work.wait(*timeout)
        self._recorder.wait_begins(self._call)
        result = self._work.wait(*timeout)
        self._recorder.ends(self._call)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _name_of(group: dist.ProcessGroup | None) -> str:
    name = getattr(group, "group_desc", "")
    return "world" if name in _DEFAULT_GROUP else str(name)
