"""Which steps are timed, and how the times of all ranks come together at rank 0.

A step that is timed costs a look at the clock per instruction, one gathering when it is over, and,
where the ranks are on several machines, a few meetings before it that bring their clocks together.
Any other costs nothing.

The pipeline that is timed is that of rank 0: the first data and tensor rank of each stage.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemega.mesh import Mesh
from pipemega.pipeline.clocks import Meeting, offset
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.recorder import OFF, Clock, Marks, Recorder, recorder_for
from pipemega.pipeline.trace import Trace

# The bounds of the clocks hardly get closer with more.
MEETINGS = 8


@dataclass(frozen=True)
class _Told:
    """What one rank tells rank 0; without meetings, its clock is that of rank 0."""

    meetings: tuple[Meeting, ...]
    marks: Marks


class Tracer:
    """Times the steps that it is asked to.

    Args:
        mesh: whose first pipeline is timed.
        steps: the numbers of the steps to time, the first one being 1; the same on all ranks.
        every: also each whose number is a multiple of this; 0: none.
        memory: in these steps, also weigh what each instruction leaves in memory.
        clock: of this process.
        host: names the machine; ranks that name the same one have one clock. Empty: not known.
    """

    def __init__(
        self,
        mesh: Mesh,
        steps: Collection[int] = (),
        every: int = 0,
        memory: bool = False,
        *,
        clock: Clock = time.perf_counter_ns,
        host: str | None = None,
    ) -> None:
        self._mesh, self._clock = mesh, clock
        self._steps, self._every, self._memory = steps, every, memory
        self._host = _host() if host is None else host
        self._takes_part = mesh.data.rank == 0 and mesh.tensor.rank == 0
        self._next: bool | None = None  # if it is timed: whether it is weighed
        self._one_clock: bool | None = None
        self._meetings: tuple[Meeting, ...] = ()
        self._recorder: Recorder = OFF

    def trace_next_step(self, memory: bool = False) -> None:
        """Times the next step, whatever its number is; all ranks call it."""
        self._next = memory

    def begin(self, step: int) -> Recorder:
        """For the step with this number, which begins now."""
        asked, self._next = self._next, None
        due = step in self._steps or (self._every > 0 and step % self._every == 0)
        self._recorder = OFF
        if self._takes_part and (due or asked is not None):
            self._meetings = self._meet()
            weighs = bool(asked) or (due and self._memory)
            self._recorder = recorder_for(self._mesh.device, weighs, self._clock)
        return self._recorder

    def finish(self, step: int, plan: Plan) -> Trace | None:
        """The step that is over, if it was timed; on rank 0, None on the others."""
        marks = self._recorder.marks()
        self._recorder = OFF
        if marks is None:
            return None
        told = self._gather(_Told(self._meetings, marks))
        return None if told is None else _trace(step, plan, told)

    def _meet(self) -> tuple[Meeting, ...]:
        axis, device = self._mesh.pipeline, self._mesh.device
        if self._one_clock is None:
            hosts: list[Any] = [self._host] * axis.size
            if axis.size > 1:
                dist.all_gather_object(hosts, self._host, group=axis.group)
            self._one_clock = axis.size == 1 or (bool(self._host) and len(set(hosts)) == 1)
        if self._one_clock:
            return ()
        token, meetings = torch.zeros(1, device=device), []
        for _ in range(MEETINGS):
            come = self._clock()
            dist.all_reduce(token, group=axis.group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            meetings.append(Meeting(come, self._clock()))
        return tuple(meetings)

    def _gather(self, mine: _Told) -> list[_Told] | None:
        axis = self._mesh.pipeline
        if axis.size == 1:
            return [mine]
        first = axis.ranks[0]
        told: list[_Told] | None = [mine] * axis.size if axis.rank == 0 else None
        dist.gather_object(mine, told, dst=first, group=axis.group)
        return told


def _trace(step: int, plan: Plan, told: Sequence[_Told]) -> Trace:
    """All marks by the clock of pipeline rank 0, from the first beginning."""
    apart = [
        offset(told[0].meetings, other.meetings) if other.meetings else (0.0, 0.0) for other in told
    ]
    # The first is its own measure.
    offsets, errors = zip((0.0, 0.0), *apart[1:], strict=True)
    zero = min(other.marks.began - ahead for other, ahead in zip(told, offsets, strict=True))

    def seconds(times: Sequence[int], ahead: float) -> tuple[float, ...]:
        return tuple(round((at - ahead - zero) * 1e-9, 9) for at in times)

    by_rank = [(other.marks, ahead) for other, ahead in zip(told, offsets, strict=True)]
    measured = all(marks.memory for marks, _ in by_rank)
    return Trace(
        step,
        plan,
        tuple(seconds([marks.began], ahead)[0] for marks, ahead in by_rank),
        tuple(seconds(marks.ready, ahead) for marks, ahead in by_rank),
        tuple(seconds(marks.end, ahead) for marks, ahead in by_rank),
        tuple(marks.memory for marks, _ in by_rank) if measured else None,
        # Between two ranks that are both aligned to the first, twice.
        round(2 * max(errors) * 1e-9, 9),
    )


def _host() -> str:
    """Names the machine since it was started; empty where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
