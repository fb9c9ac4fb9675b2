"""One training step, and the features that watch steps and the run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipemega.engine.run.batch_reader import StepData
from pipemega.monitor import EpochRecord, Phase
from pipemega.optimizer import StepReport
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.recorder import NULL_RECORDER, BusyTimeRecorder, Recorder


@dataclass(frozen=True)
class TrainStep:
    """One training step, as its features get it.

    Args:
        number: 1 for the first step of a run.
        plan: what every pipeline rank runs, lowered.
        data: the micro-batches of this rank.
        phases: the phases of the step, in `after_step`.
    """

    number: int
    plan: Plan
    data: StepData
    phases: Sequence[Phase] = ()


@dataclass(frozen=True)
class PlanChange:
    """What runs from the next step on.

    Args:
        plan: the next plan, on the current stages.
        moved: a plan on other stages, and their bounds; used instead if the stages can move.
    """

    plan: Plan
    moved: tuple[Plan, Bounds] | None = None


class StepFeature:
    """Watches the steps and the run of an engine; here each method does nothing.

    Each method is called on every rank. Points of one step, in this order:

        traces          the step was read: should it be traced?
        before_step     forwards and backwards follow
        on_report       a step became final; with post-validation, the step before
        after_step      the optimizer step has ended; in the reverse order of the features
        next_change     another plan for the next steps
        after_record    the step was counted and recorded
        after_epoch     it ended an epoch
        evaluate        an evaluation is due
        before_save     a checkpoint follows

    The last four are points of a run that keeps records. `after_load` follows the loading of a
    checkpoint that continues a run; if it was loaded before the feature was added, it is called
    when the run begins.

    Attributes:
        records_experts: the loads of experts, and auxiliary losses, are part of the reports.
    """

    records_experts = False

    def traces(self, step: TrainStep) -> bool | None:
        """Return whether to trace memory too, if the step must be traced; None: it need not be."""
        return None

    def before_step(self, step: TrainStep) -> Recorder | None:
        """Return what times the instructions, if anything; the first feature that does so wins."""
        return None

    def on_report(self, report: StepReport) -> None:
        """Handle the report of a step that became final."""

    def after_step(self, step: TrainStep) -> None:
        """Handle the end of the optimizer step."""

    def next_change(self, step: TrainStep, trace: Any) -> PlanChange | None:
        """Return what the next steps run; None: the same.

        Args:
            trace: the `profiling.step_trace.Trace` of the step, if it was traced; None on other
                ranks than 0.
        """
        return None

    def on_change(self, change: PlanChange, obstacle: str) -> None:
        """Handle the use of a change.

        Args:
            obstacle: why the stages of `moved` are not used; "" if they are.
        """

    def after_record(self, loss: float) -> None:
        """Handle the end of a step."""

    def after_epoch(self, epoch: EpochRecord) -> None:
        """Handle the end of an epoch."""

    def evaluate(self) -> None:
        """Evaluate the model."""

    def before_save(self) -> None:
        """Prepare the state for a checkpoint."""

    def after_load(self) -> None:
        """Handle the state of a checkpoint, after `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return state that is saved with each checkpoint, as JSON values, on rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` of the run that saved; {} if that run had no such feature.

        Raises:
            CheckpointError: another feature has saved the state; on every rank.
        """


class MeasureBusyTime(StepFeature):
    """Measures the seconds that this rank reads data and computes, without waiting.

    Args:
        enabled: also time the instructions of steps that are not traced.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._recorder = BusyTimeRecorder(device) if enabled else NULL_RECORDER
        self._read_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the last step; on CUDA with the computing time of the step before it."""
        return self._recorder.seconds() + self._read_seconds

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Measure the reading of a batch."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._read_seconds = time.perf_counter() - started

    def before_step(self, step: TrainStep) -> Recorder | None:
        return self._recorder
