"""What a run says about itself: a record of each step, and of what befalls it."""

import logging
import math
import resource
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemega.checkpoint import is_remote
from pipemega.config import Config
from pipemega.engine import Engine
from pipemega.monitor import (
    EventRecord,
    Monitor,
    Record,
    ResumePoint,
    StepRecord,
    breakdown_line,
    breakdown_scalars,
    build_sinks,
    peak_tflops,
    tflops_per_device,
)
from pipemega.optimizer import StepReport
from pipemega.training.history import RunHistory
from pipemega.training.nonfinite import NonFinitePolicy
from pipemega.training.spikes import SpikeDetector
from pipemega.training.stragglers import StragglerWatch
from pipemega.training.timelines import write_timeline


class Journal:
    """Keeps the records of an engine's steps; every method is collective.

    Args:
        engine: whose steps they are.
        state: `state_dict()` of an earlier run; {} for a new one.
        log: of this rank.
        tokens_per_sample, flops_per_token: for tokens/s, TFLOP/s and MFU; 0 leaves them out.

    Attributes:
        history: what has befallen the run so far.
        policy: what is done about steps with inf or nan.
        monitor: where records go; on rank 0 only.
    """

    def __init__(
        self,
        engine: Engine,
        state: Mapping[str, Any],
        log: logging.Logger,
        *,
        tokens_per_sample: int = 0,
        flops_per_token: float = 0.0,
    ) -> None:
        self._engine, self._config, self._log = engine, engine.config, log
        self._tokens_per_sample, self._flops_per_token = tokens_per_sample, flops_per_token
        self._peak = self._config.monitor.peak_tflops or _device_peak(engine.mesh.device)
        self._drafts: deque[StepRecord] = deque()  # of steps whose norm is not known yet
        training = self._config.training
        self.history = RunHistory.of(state.get("history", {}))
        self.policy = NonFinitePolicy(self._config, self.history, self.warn)
        self._spikes = SpikeDetector(training.loss_spikes.window, training.loss_spikes.factor)
        if "spikes" in state:
            self._spikes.load_state_dict(state["spikes"])
        self._stragglers = StragglerWatch(
            engine.mesh,
            training.stragglers.factor,
            training.stragglers.interval or self._config.steps_per_print or 10,
        )
        self._forget_steps()
        self.monitor = self._open_monitor(state.get("monitor"))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run's journal goes on from."""
        return {
            "monitor": self.monitor.state_dict(),
            "history": self.history.state_dict(),
            "spikes": self._spikes.state_dict(),
        }

    def go_back(self) -> None:
        """The engine has loaded an earlier step: what was written of later ones is dropped."""
        sinks = self.monitor.state_dict()
        self.monitor.close()
        self._forget_steps()
        self.monitor = self._open_monitor(sinks)

    def _open_monitor(self, state: dict[str, Any] | None) -> Monitor:
        engine, resume = self._engine, None
        if engine.global_steps:
            resume = ResumePoint(engine.global_steps, engine.consumed_samples)
        return build_sinks(
            self._config,
            run_folder(self._config),
            is_main=engine.mesh.rank == 0,
            logger=self._log,
            resume=resume,
            state=state,
        )

    def _forget_steps(self) -> None:
        """Leaves nothing of steps that were not ours, or that do not count any more."""
        self._engine.settle()
        self._engine.take_reports()
        self._engine.examiner.take()
        self._drafts.clear()

    # Steps

    def add(self, loss: float, seconds: float) -> None:
        """Takes note of the step that the engine has just done."""
        draft = self._draft(loss, seconds)
        # A step that ended in an error, and is done again, has left one.
        while self._drafts and self._drafts[-1].step >= draft.step:
            self._drafts.pop()
        self._drafts.append(draft)
        self.write_decided()
        self._write_timeline()

    def _draft(self, loss: float, seconds: float) -> StepRecord:
        """What is known of a step as soon as it has run."""
        engine = self._engine
        samples = engine.batch.train_batch_size
        tokens = samples * self._tokens_per_sample
        tflops = None
        if self._flops_per_token:
            flops = self._flops_per_token * tokens
            tflops = tflops_per_device(flops, seconds, engine.mesh.world.size)
        return StepRecord(
            step=engine.global_steps,
            consumed_samples=engine.consumed_samples,
            consumed_tokens=engine.consumed_samples * self._tokens_per_sample,
            loss=loss,
            lr=math.nan,
            step_seconds=seconds,
            samples_per_second=samples / seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_device=tflops,
            mfu=tflops / self._peak if tflops and self._peak else None,
            memory_gib=self._memory() if self._prints() else None,
            extra={**self._breakdown(), **self._compare_ranks()},
        )

    def write_decided(self) -> None:
        """Writes the records of all steps that are decided.

        That is the last one, or with `pipeline.optimizer_sync: "post_validate"` the one before.

        Raises:
            NonFiniteError: a step was skipped that was not to be, or one too many.
        """
        engine = self._engine
        reports, origins = engine.take_reports(), deque(engine.examiner.take())
        for report in reports:
            draft = self._drafts.popleft()
            if not (math.isfinite(draft.loss) and math.isfinite(report.grad_norm)):
                self.history.nan_steps += 1
            extra = dict(draft.extra)
            if self._config.pipeline.optimizer_sync == "post_validate":
                extra["rollbacks"] = report.rollbacks
            self.monitor.write(
                replace(
                    draft,
                    lr=report.learning_rate,
                    grad_norm=report.grad_norm,
                    loss_scale=report.loss_scale if self._config.fp16.enabled else None,
                    skipped_steps=report.skipped_steps,
                    nan_steps=self.history.nan_steps,
                    extra=extra,
                )
            )
            self._warn_of_spike(draft.step, report)
            if engine.examiner.is_case(report):
                self._tell_nonfinite(draft.step, report, origins.popleft())

    def _write_timeline(self) -> None:
        """Of this step, if it was timed; on rank 0, which alone has it."""
        engine, trace = self._engine, self._engine.last_trace
        if trace is None or trace.step != engine.global_steps:
            return
        wanted = self._config.monitor.trace.folder
        folder = Path(wanted) if wanted else run_folder(self._config) / "timelines"
        self.monitor.write(write_timeline(trace, folder, engine.consumed_samples, self._log))

    def _prints(self) -> bool:
        every = self._config.steps_per_print or 0
        return every > 0 and self._engine.global_steps % every == 0

    def _breakdown(self) -> dict[str, float]:
        if not self._config.wall_clock_breakdown:
            return {}
        seconds = self._engine.timers.lap()
        if self._prints():
            self._log.info(breakdown_line(self._engine.global_steps, seconds))
        return breakdown_scalars(seconds)

    def _memory(self) -> float:
        """Peak GiB of the fullest rank: on a GPU what was allocated, on a CPU the process."""
        mesh = self._engine.mesh
        if mesh.device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(mesh.device))
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        if self._config.memory_breakdown:
            self._log.info(f"memory of rank {mesh.rank}: peak {peak / 2**30:.2f} GiB")
        tensor = torch.tensor(peak, dtype=torch.float64, device=mesh.device)
        if mesh.world.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.world.group)
        return float(tensor.item()) / 2**30

    # Events

    def write(self, record: Record) -> None:
        """Writes a record that is none of a step."""
        self.monitor.write(record)

    def event(self, name: str, values: Mapping[str, float], text: str) -> None:
        """Records that something befell the run; the log is the caller's."""
        step, samples = self._engine.global_steps, self._engine.consumed_samples
        self.monitor.write(
            EventRecord(step=step, consumed_samples=samples, name=name, values=values, text=text)
        )

    def warn(self, text: str) -> None:
        """Says what all ranks know: by one of them."""
        if self._engine.mesh.rank == 0:
            self._log.warning(text)

    def _warn_of_spike(self, step: int, report: StepReport) -> None:
        spike = self._spikes.see(report.loss)
        if spike is None:
            return
        self.history.spikes += 1
        text = (
            f"loss {spike.loss:.4f} at step {step} is a spike: the median of the steps before is "
            f"{spike.median:.4f}, and what lies above {spike.bound:.4f} is no noise "
            f"(training.loss_spikes.factor {self._config.training.loss_spikes.factor:g})"
        )
        self.warn(text)
        self.event("loss_spike", {"loss": spike.loss, "bound": spike.bound}, text)

    def _tell_nonfinite(self, step: int, report: StepReport, origin: str) -> None:
        what = report.in_words(step)
        self.event("nonfinite", {"skipped_steps": report.skipped_steps}, f"{what}: {origin}")
        self.policy.skipped(what, origin)

    def _compare_ranks(self) -> dict[str, float]:
        """What the ranks took, every so many steps; a straggler is named."""
        engine, watch = self._engine, self._stragglers
        summary = watch.see(engine.work_seconds)
        if summary is None:
            return {}
        if watch.is_news(summary):
            place = engine.mesh.topology.coordinate(summary.slowest)
            stages = ", ".join(map(str, engine.plan.stages_of(place.pipeline)))
            text = (
                f"rank {summary.slowest} ({watch.where(summary.slowest)}; stage {stages}, data "
                f"rank {place.data}) takes {summary.seconds * 1e3:.1f} ms for its own work in a "
                f"step, {summary.ratio:.1f} times the usual {summary.usual * 1e3:.1f} ms, and all "
                f"wait for it (training.stragglers.factor "
                f"{self._config.training.stragglers.factor:g})"
            )
            if engine.mesh.data.size == 1:
                text += "; how much work a stage has is pipeline.partition's to say"
            self.warn(text)
            self.event("straggler", summary.scalars(), text)
        return summary.scalars()


def run_folder(config: Config) -> Path:
    """Where a run leaves what it writes beside its checkpoints."""
    folder = config.checkpoint.save or "runs/latest"
    # What is written line by line has no place in an object store.
    return Path("runs", Path(folder).name) if is_remote(folder) else Path(folder)


def _device_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(device))
