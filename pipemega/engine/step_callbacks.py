"""Step callbacks: observe training steps (tracing, busy time, schedule tuning)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipemega.config.sections.monitor_sections import TraceSection
from pipemega.distributed.mesh import Mesh
from pipemega.monitor import Phase, StepPhases
from pipemega.optimizer import StepReport
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.recorder import NULL_RECORDER, BusyTimeRecorder, Recorder
from pipemega.profiling.step_trace import Trace
from pipemega.profiling.step_tracer import Tracer


@dataclass
class TrainStep:
    """One training step, passed to the callbacks, which may change it.

    Attributes:
        number: 1 for the first step of a run.
        plan: what every pipeline rank runs, lowered.
        micro_batches: returns the micro-batches of this rank.
        recorder: times the instructions; set by `before_step`.
        trace_memory: None: do not trace this step, unless the config says so; True: also record
            memory. Set by `before_step`.
        should_stop: called once, late in the step; the engine's `stop_requested` is True if it
            returned True on any rank. Set by `before_step`.
        trace: the traced step, in `after_step`; on rank 0 only.
        phases: of this step, in `after_step`.
        next_plan: runs from the next step on; set by `after_step`.
        next_bounds: of the stages of `next_plan`, if they are others; set by `after_step`.
        obstacle: returns why the stages cannot move to those of a plan with these bounds, ""
            if they can. Collective.
    """

    number: int
    plan: Plan
    micro_batches: Callable[[], MicroBatches]
    recorder: Recorder = NULL_RECORDER
    trace_memory: bool | None = None
    should_stop: Callable[[], bool] = lambda: False
    trace: Trace | None = None
    phases: Sequence[Phase] = ()
    next_plan: Plan | None = None
    next_bounds: Bounds | None = None
    obstacle: Callable[[Plan, Bounds], str] = lambda *_: "the stages of this engine cannot move"


class StepCallback:
    """Observes the training steps of an engine; each method is called on every rank.

    An engine calls `before_step` in the order of its callbacks, `after_step` in reverse order.
    """

    def before_step(self, step: TrainStep) -> None:
        """Handle the start of a step: the batch was read, and forwards and backwards follow."""

    def after_step(self, step: TrainStep) -> None:
        """Handle the end of the optimizer step."""

    def on_report(self, report: StepReport) -> None:
        """Handle the report of a step that became final; post-validation: in the next step."""


class TraceSteps(StepCallback):
    """Traces the steps that the config, a caller or another callback selects.

    Args:
        phases: of the steps; the preparation of a traced step is a phase of it.

    Attributes:
        executor: of the current stages; set by the engine.
        tracer: selects and times steps.
        last_trace: the last traced step; on rank 0 only.
    """

    executor: Executor

    def __init__(self, section: TraceSection, mesh: Mesh, phases: StepPhases) -> None:
        self._phases = phases
        self.tracer = Tracer(mesh, section.steps, section.every, section.memory)
        self.last_trace: Trace | None = None

    def before_step(self, step: TrainStep) -> None:
        if step.trace_memory is not None:
            self.tracer.trace_next_step(step.trace_memory)
        with self._phases("tracing"):
            step.recorder = self.tracer.begin(step.number)

    def after_step(self, step: TrainStep) -> None:
        # The plan of the executor: speculative forwards reorder its receives.
        step.trace = self.tracer.finish(step.number, self.executor.plan, step.phases)
        self.last_trace = step.trace or self.last_trace


class MeasureBusyTime(StepCallback):
    """Measures the seconds that this rank reads data and computes, without waiting.

    Args:
        enabled: also time the instructions of steps that are not traced.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._recorder = BusyTimeRecorder(device) if enabled else NULL_RECORDER
        self._read_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the last step; on CUDA its computing time is that of the step before."""
        return self._recorder.seconds() + self._read_seconds

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Measure the reading of a batch."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._read_seconds = time.perf_counter() - started

    def before_step(self, step: TrainStep) -> None:
        if step.recorder is NULL_RECORDER:
            step.recorder = self._recorder
