"""Records the communication of one step, and logs a table of it: DeepSpeed's `comms_logger`."""

from dataclasses import dataclass
from textwrap import indent

from pipemega.config.sections.monitor_sections import OPERATIONS, CommsLoggerSection
from pipemega.distributed.comm_recorder import (
    NOTHING,
    CommKind,
    CommRecorder,
    Totals,
    record_with,
)
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.train_step import StepFeature, TrainStep
from pipemega.monitor import get_logger
from pipemega.monitor.timers import HostClock
from pipemega.pipeline.recorder import step_clock
from pipemega.printing import aligned

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
        nbytes: of one call; the mean if `operation` has several sizes.
        calls: of all ranks; a collective counts on each of its ranks.
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
        rows: of the recorded step, sorted by the seconds of waits; on every rank, [] before it.
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
