"""Traces chosen steps: times every instruction and gathers the times of all ranks at rank 0.

A traced step reads the clock at each instruction and gathers the times once at its end. If the
ranks run on several machines, a few all-reduces before the step synchronize their clocks. A step
that is not traced costs nothing.

Only the pipeline of rank 0 is traced: the first data and tensor rank of each pipeline rank.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pipemega.config.sections.monitor_sections import TraceSection
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.train_step import StepFeature, TrainStep
from pipemega.monitor import Phase, StepPhases
from pipemega.pipeline import recorder
from pipemega.pipeline.plan.instructions import Plan
from pipemega.profiling.step_trace import ClockSample, Trace, clock_offset

# More samples hardly improve the bounds of the clock offset.
NUM_CLOCK_SAMPLES = 8


@dataclass(frozen=True)
class _RankTimes:
    """What one rank sends to rank 0; without clock samples it has the same clock as rank 0."""

    clock_samples: tuple[ClockSample, ...]
    marks: recorder.InstructionTimes
    phases: Sequence[Phase]


class Tracer(StepFeature):
    """Traces the steps that the config, a script or another feature selects.

    Args:
        section: `monitor.trace`, which selects the steps; equal on all ranks.
        mesh: its first pipeline is traced.
        phases: the phases of the steps; the preparation of a traced step is a phase of it.
        ran: returns the plan that ran: speculative forwards reorder the receives of a plan.
        clock: the clock of this process, in nanoseconds.
        host: name of the machine; ranks with equal names share one clock. Empty: unknown.

    Attributes:
        trace: the trace of the last step, if it was traced; on rank 0 only.
        last_trace: the trace of the last traced step; on rank 0 only.
    """

    def __init__(
        self,
        section: TraceSection,
        mesh: Mesh,
        phases: StepPhases,
        ran: Callable[[], Plan],
        *,
        clock: recorder.Clock = time.perf_counter_ns,
        host: str | None = None,
    ) -> None:
        self._section, self._mesh, self._phases, self._ran = section, mesh, phases, ran
        self._clock = clock
        self._host = _boot_id() if host is None else host
        self._takes_part = mesh.is_first_replica
        self._requested: bool | None = None  # argument of trace_next_step
        self._one_clock: bool | None = None
        self._clock_samples: tuple[ClockSample, ...] = ()
        self._recorder: recorder.Recorder = recorder.NULL_RECORDER
        self.trace: Trace | None = None
        self.last_trace: Trace | None = None

    def trace_next_step(self, memory: bool = False) -> None:
        """Trace the next step, even if the config does not select it; call it on all ranks."""
        self._requested = memory

    def is_due(self, step: int) -> bool:
        """Return whether the config or `trace_next_step` selects the step with this number."""
        return self._is_configured(step) or self._requested is not None

    def _is_configured(self, step: int) -> bool:
        every = self._section.every
        return step in self._section.steps or (every > 0 and step % every == 0)

    def before_step(self, step: TrainStep) -> recorder.Recorder:
        requested, self._requested = self._requested, None
        due = self._is_configured(step.number)
        self._recorder = recorder.NULL_RECORDER
        if self._takes_part and (due or requested is not None):
            with self._phases("tracing"):
                self._clock_samples = self._sample_clocks()
                memory = bool(requested) or (due and self._section.memory)
                self._recorder = recorder.make_recorder(self._mesh.device, memory, self._clock)
        return self._recorder

    def after_step(self, step: TrainStep) -> None:
        self.trace = None
        marks = self._recorder.marks()
        self._recorder = recorder.NULL_RECORDER
        if marks is None:
            return
        times = self._gather(_RankTimes(self._clock_samples, marks, step.phases))
        if times is not None:
            self.trace = self.last_trace = _trace(step.number, self._ran(), times)

    def _sample_clocks(self) -> tuple[ClockSample, ...]:
        """Return the samples of a few all-reduces; none if all ranks share one clock."""
        axis, device = self._mesh.pipeline, self._mesh.device
        if self._one_clock is None:
            hosts = gather_objects(self._host, axis)
            self._one_clock = axis.size == 1 or (bool(self._host) and len(set(hosts)) == 1)
        if self._one_clock:
            return ()
        token, samples = torch.zeros(1, device=device), []
        for _ in range(NUM_CLOCK_SAMPLES):
            enter = self._clock()
            all_reduce(token, axis)
            synchronize()
            samples.append(ClockSample(enter, self._clock()))
        return tuple(samples)

    def _gather(self, own: _RankTimes) -> list[_RankTimes] | None:
        """Return the times of all pipeline ranks on the first one, None on the others."""
        axis = self._mesh.pipeline
        if axis.size == 1:
            return [own]
        gathered: list[_RankTimes] | None = [own] * axis.size if axis.rank == 0 else None
        dist.gather_object(own, gathered, dst=axis.ranks[0], group=axis.group)
        return gathered


def _trace(step: int, plan: Plan, times: Sequence[_RankTimes]) -> Trace:
    """Convert the times of all ranks to seconds on the clock of pipeline rank 0."""
    first = times[0].clock_samples
    # Without samples all ranks share one clock; rank 0 is the reference.
    synced = [(0.0, 0.0)] + [
        clock_offset(first, rank.clock_samples) if rank.clock_samples else (0.0, 0.0)
        for rank in times[1:]
    ]
    offsets, errors = zip(*synced, strict=True)
    by_rank = [(rank.marks, offset) for rank, offset in zip(times, offsets, strict=True)]
    zero = min(marks.began - offset for marks, offset in by_rank)

    def seconds(nanoseconds: Sequence[int], offset: float) -> tuple[float, ...]:
        return tuple(round((time - offset - zero) * 1e-9, 9) for time in nanoseconds)

    has_memory = all(marks.memory for marks, _ in by_rank)
    return Trace(
        step,
        plan,
        tuple(seconds([marks.began], offset)[0] for marks, offset in by_rank),
        tuple(seconds(marks.ready, offset) for marks, offset in by_rank),
        tuple(seconds(marks.end, offset) for marks, offset in by_rank),
        tuple(marks.memory for marks, _ in by_rank) if has_memory else None,
        # Twice: both of two ranks may be off by this much from rank 0.
        round(2 * max(errors) * 1e-9, 9),
        tuple(
            tuple(
                Phase(phase.name, *seconds([int(phase.start), int(phase.end)], offset))
                for phase in rank.phases
            )
            for rank, offset in zip(times, offsets, strict=True)
        ),
    )


def _boot_id() -> str:
    """Return an id of this machine since its last boot; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
