"""The table of `comms_logger`: the collectives and messages of one step, by kind.

A `CommRecorder` makes and records the calls that go through `exchanges.recorded` during the step:

    started            wait()       complete
       |---- other work ----|-- waited --|
       |------------ in flight ----------|

The events of torch.profiler do not suffice: events of gloo do not name the process group, its
reduce-scatter has the event of an all-reduce, and messages through local sockets have no event.
"""

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

import torch.distributed as dist

from pipemega.config.sections.monitor_sections import OPERATIONS, CommsLoggerSection
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import record_with
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.train_step import StepFeature, TrainStep
from pipemega.monitor import get_logger
from pipemega.monitor.timers import HostClock, StepClock
from pipemega.pipeline.recorder import step_clock
from pipemega.printing import aligned

# torch's names of the group of all ranks.
_DEFAULT_GROUP = ("", "undefined", "default_pg")


class CommKind(NamedTuple):
    """A kind of communication.

    Args:
        name: such as "all_reduce".
        group: the mesh axis, or "world".
        ranks: number of ranks of the group; 2 for a message.
        nbytes: bytes of the whole tensor: the gathered one, the one that is scattered.
    """

    name: str
    group: str
    ranks: int
    nbytes: int


class Totals(NamedTuple):
    """What was recorded of a kind of communication.

    Args:
        calls: how many were started.
        completed: number of calls with known seconds, which are the calls the rank waited for.
        seconds: sum of the seconds in flight.
        waited: sum of the seconds of the waits.
    """

    calls: int
    completed: int
    seconds: float
    waited: float

    def plus(self, other: "Totals") -> "Totals":
        """Return the sums of both."""
        return Totals(*map(operator.add, self, other))


NOTHING = Totals(0, 0, 0.0, 0.0)


@dataclass
class _Call:
    kind: CommKind
    clock: StepClock
    started: Any
    wait_started: Any = None
    ended: Any = None


class CommRecorder:
    """Records the calls of this process.

    Args:
        device, host: clocks of collectives on the device, and of those on the host.
        operations: names of those to record; None: all.
    """

    def __init__(
        self, device: StepClock, host: StepClock, operations: Collection[str] | None = None
    ) -> None:
        self._device, self._host, self._operations = device, host, operations
        self._calls: list[_Call] = []

    def __call__(
        self,
        name: str,
        nbytes: int,
        group: dist.ProcessGroup | None,
        call: Callable[[], Any],
        *,
        ranks: int,
        on_host: bool,
    ) -> Any:
        """Call `call` and record it; see `exchanges.recorded`."""
        if self._operations is not None and name not in self._operations:
            return call()
        kind = CommKind(name, _name_of(group), ranks or dist.get_world_size(group), nbytes)
        clock = self._host if on_host else self._device
        entry = _Call(kind, clock, clock.now())
        self._calls.append(entry)
        result = call()
        # Not all are a `dist.Work`: see `local_sockets`.
        if hasattr(result, "wait"):
            return _RecordedWork(result, entry)
        if isinstance(result, list):
            *others, last = result
            return [*others, _RecordedWork(last, entry)]
        if result is None:
            # It was synchronous.
            entry.wait_started, entry.ended = entry.started, clock.now()
        return result

    def totals(self) -> dict[CommKind, Totals]:
        """Return the sums per kind; waits until the device has completed the calls."""
        found = dict.fromkeys((call.kind for call in self._calls), NOTHING)
        for call in self._calls:
            found[call.kind] = found[call.kind].plus(Totals(1, 0, 0.0, 0.0))
        for clock in (self._device, self._host):
            complete = [c for c in self._calls if c.clock is clock and c.ended is not None]
            seconds = clock.durations([(call.started, call.ended) for call in complete])
            waited = clock.durations([(call.wait_started, call.ended) for call in complete])
            for call, total, wait in zip(complete, seconds, waited, strict=True):
                one = Totals(0, 1, total / 1e9, wait / 1e9)
                found[call.kind] = found[call.kind].plus(one)
        return found


class _RecordedWork:
    """A `dist.Work` whose first wait is recorded."""

    def __init__(self, work: dist.Work, call: _Call) -> None:
        self._work, self._call = work, call

    def wait(self, *timeout: Any) -> bool:
        call = self._call
        if call.ended is not None:
            return self._work.wait(*timeout)
        call.wait_started = call.clock.now()
        result = self._work.wait(*timeout)
        call.ended = call.clock.now()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _name_of(group: dist.ProcessGroup | None) -> str:
    name = getattr(group, "group_desc", "")
    return "world" if name in _DEFAULT_GROUP else str(name)


_HEAD = (
    "operation", "group", "ranks", "bytes", "calls", "total MB", "ms", "waited ms", "algbw Gb/s",
    "busbw Gb/s",
)  # fmt: skip

# A receive is posted early, and a send is waited for late: their time in flight says nothing.
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class CommRow:
    """The communication of one kind in a step, over all ranks.

    Args:
        nbytes: bytes of one call; the mean if `operation` has several sizes.
        calls: number of calls of all ranks; a collective counts on each of its ranks.
        completed, seconds, waited: see `Totals`; sums over all ranks.
    """

    operation: str
    group: str
    ranks: int
    nbytes: float
    calls: int
    completed: int
    seconds: float
    waited: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of a call, as nccl-tests defines it; 0: not known."""
        return self.nbytes * self.completed / self.seconds if self.seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second over the slowest link.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        share = (self.ranks - 1) / self.ranks
        factors = {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "all_to_all": share,
        }
        return self.algorithm_bandwidth * factors.get(self.operation, 1.0)


class CommsLogger(StepFeature):
    """Records one step on all ranks; rank 0 logs the table.  Collective at the end of the step.

    Args:
        section: `comms_logger`, which selects the step and the operations.

    Attributes:
        rows: the rows of the recorded step on every rank, sorted by the seconds of waits; [] before
            the step.
    """

    def __init__(self, section: CommsLoggerSection, mesh: Mesh) -> None:
        self._section, self._mesh = section, mesh
        self._steps = 0
        self._recorder: CommRecorder | None = None
        self.rows: list[CommRow] = []

    def before_step(self, step: TrainStep) -> None:
        self._steps += 1
        if self._steps == self._section.profile_step:
            clock = step_clock(self._mesh.device)
            self._recorder = CommRecorder(clock, HostClock(), _recorded_operations(self._section))
            record_with(self._recorder)

    def after_step(self, step: TrainStep) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        record_with(None)
        # The clock of a device waits only for the last of its events.
        synchronize()
        totals = gather_objects(recorder.totals(), self._mesh.world)
        self.rows = _rows(totals, by_size=self._section.verbose)
        if self._mesh.rank == 0:
            get_logger().info("%s", table(self.rows, step.number, self._mesh.world.size))


def _recorded_operations(section: CommsLoggerSection) -> frozenset[str] | None:
    """Return our names of the operations to record; None: all."""
    if section.prof_all:
        return None
    return frozenset(OPERATIONS[name] for name in section.prof_ops)


def _rows(of_ranks: list[dict[CommKind, Totals]], *, by_size: bool) -> list[CommRow]:
    """Add the totals of all ranks."""
    added: dict[tuple[str, str, int, int | None], tuple[int, Totals]] = {}
    for totals in of_ranks:
        for operation, one in totals.items():
            size = operation.nbytes if by_size else None
            key = (operation.name, operation.group, operation.ranks, size)
            nbytes, sums = added.get(key, (0, NOTHING))
            added[key] = (nbytes + operation.nbytes * one.calls, sums.plus(one))
    rows = [
        CommRow(name, group, ranks, nbytes / sums.calls, *sums)
        for (name, group, ranks, _), (nbytes, sums) in added.items()
    ]
    return sorted(rows, key=lambda row: (-row.waited, row.operation, row.group, row.nbytes))


def table(rows: list[CommRow], step: int, world_size: int) -> str:
    """Return the table as text."""
    if not rows:
        return f"communication of step {step}: none ({world_size} rank(s))"
    lines = aligned([_HEAD, *map(_cells, rows)], left=2)
    calls, total = sum(row.calls for row in rows), sum(row.nbytes * row.calls for row in rows)
    head = (
        f"communication of step {step}: {calls} calls on {world_size} ranks, {total / 1e6:,.2f} MB "
        "(ms: a call from its start to the end of the wait for it; waited ms: the wait alone)"
    )
    return f"{head}\n{indent(lines, '  ')}"


def _cells(row: CommRow) -> list[str]:
    measured = ["-"] * 4
    if row.completed:
        measured[1] = f"{1e3 * row.waited / row.completed:,.3f}"
    if row.completed and row.operation not in _MESSAGES:
        measured[0] = f"{1e3 * row.seconds / row.completed:,.3f}"
        measured[2:] = [f"{8e-9 * bw:,.2f}" for bw in (row.algorithm_bandwidth, row.bus_bandwidth)]
    total = f"{row.nbytes * row.calls / 1e6:,.2f}"
    counts = [str(row.ranks), f"{row.nbytes:,.0f}", str(row.calls), total]
    return [row.operation, row.group, *counts, *measured]
