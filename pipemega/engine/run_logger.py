"""Writes a record of each step, and of events such as loss spikes, to the monitor."""

import atexit
import logging
import math
import resource
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemega.diagnostics.stragglers import SHOWN_RANKS, SpikeDetector, StragglerWatch
from pipemega.engine.run.run_folder import RunFolder, run_facts
from pipemega.engine.run.run_history import EpochSums, NonFinitePolicy, RunStats, RunTimes
from pipemega.engine.step_runner import StepRunner
from pipemega.engine.train_step import StepFeature
from pipemega.lazy_imports import load_name
from pipemega.monitor import (
    Console,
    EpochRecord,
    EventRecord,
    Monitor,
    PictureRecord,
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
from pipemega.storage.locks import folder_locks


class RunLogger(StepFeature):
    """Writes the records of steps; every method is collective.

    Args:
        steps: runs the steps that are recorded.
        log: the logger of this rank.
        keeps_files: also write `metrics.jsonl` and `config.json`.

    Attributes:
        folder: the run folder.
        history: counters of the run, over all its restarts.
        policy: decides what follows a step with inf or nan.
        tokens_per_sample, flops_per_sample: tokens and FLOPs of a sample, for tokens/s, TFLOP/s
            and MFU; 0: do not record them.
    """

    records_experts = True

    def __init__(self, steps: StepRunner, log: logging.Logger, *, keeps_files: bool) -> None:
        self._steps, self._config, self._log = steps, steps.config, log
        self._keeps_files, self._shows_progress = keeps_files, False
        self.folder = RunFolder(self._config, steps.mesh, log)
        model = self._config.model
        self.tokens_per_sample = (model.sample_tokens() if model else None) or 0
        self.flops_per_sample = 0.0
        self._peak_tflops = self._config.monitor.peak_tflops
        if not self._peak_tflops and steps.mesh.device.type == "cuda":
            self._peak_tflops = peak_tflops(torch.cuda.get_device_name(steps.mesh.device))
        self._pending: deque[StepRecord] = deque()  # records of steps whose norm is not known yet
        self._reports: deque[StepReport] = deque()  # reports of steps that are not written yet
        self._loads: Any = None  # tokens of experts, for their picture; on rank 0 only
        self._elapsed: dict[str, float] = {}
        training = self._config.training
        self.history = RunStats()
        self.policy = NonFinitePolicy(self._config, self.history, self.warn)
        self._spikes = SpikeDetector(training.loss_spikes.window, training.loss_spikes.factor)
        self._stragglers = StragglerWatch(
            steps.mesh, training.stragglers, self._config.steps_per_print or 10
        )
        self._monitor: Monitor | None = None
        self._sink_states: dict[str, Any] = {}
        self._resume: ResumePoint | None = None  # where the next monitor continues

    def take_over(self) -> None:
        """Write what a Trainer writes: also files and a progress bar."""
        self._keeps_files = self._shows_progress = True

    @property
    def monitor(self) -> Monitor:
        """Writes the records; on rank 0 only. Opened at first use."""
        if self._monitor is None:
            self._monitor = self._open_monitor()
        return self._monitor

    def open(self) -> None:
        """Open the run folder, if the run has files, and the sinks."""
        if self._keeps_files:
            self.folder.open()
        self._monitor = self._monitor or self._open_monitor()

    def close(self) -> None:
        """Close the sinks; the next record opens them again. Not collective."""
        if self._monitor is not None:
            atexit.unregister(self._monitor.close)
            self._monitor.close()
            self._sink_states, self._monitor = self._monitor.state_dict(), None

    def _open_monitor(self) -> Monitor:
        resume, self._resume = self._resume or self._point(), None
        if self._steps.mesh.rank > 0:
            return Monitor([], self._log, self._sink_states)
        console = partial(
            Console,
            self._steps.data.total_steps,
            self._config.steps_per_print,
            total_epochs=self._steps.data.epochs,
            progress=self._shows_progress and self._config.training.progress,
        )
        monitor = build_sinks(
            self._config,
            self.folder.on_rank0() if self._keeps_files else None,
            console,
            logger=self._log,
            resume=resume,
            state=self._sink_states,
            facts=self._facts() if self._config.wandb.enabled else None,
        )
        # If the script ends without `Engine.close`, for example with an error.
        atexit.register(monitor.close)
        return monitor

    def _facts(self) -> dict[str, Any]:
        steps = self._steps
        return run_facts(steps.mesh, steps.batch, steps.num_parameters, steps.plan.name)

    def _point(self) -> ResumePoint | None:
        steps = self._steps
        if steps.global_steps == 0:
            return None
        return ResumePoint(steps.global_steps, steps.consumed_samples)

    def run_state(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from."""
        sinks = self._monitor.state_dict() if self._monitor else self._sink_states
        return {
            "monitor": sinks,
            "history": self.history.state_dict(),
            "spikes": self._spikes.state_dict(),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that was loaded: drop records of later steps."""
        self.close()
        self._pending.clear()
        self._reports.clear()
        self._sink_states, self._resume = state.get("monitor", {}), self._point()
        self.history.load_state_dict(state.get("history", {}))
        if "spikes" in state:
            self._spikes.load_state_dict(state["spikes"])

    def on_report(self, report: StepReport) -> None:
        """Keep the report of a step that became final, for its record."""
        self._reports.append(report)

    # Steps

    def add(self, loss: float, seconds: float, samples: int, epoch: int | None) -> None:
        """Record the step that the run has just run.

        Args:
            samples: number of samples of this step, over all data ranks.
            epoch: the epoch of the step, from 1; None if the run has no epochs.

        With `pipeline.optimizer_sync: "post_validate"` its gradient norm is known, and its record
        written, one step later.

        Raises:
            FolderLockedError: another run has taken over a folder of this run; on rank 0 only.
        """
        folder_locks.verify_heartbeats()
        record = self._step_record(loss, seconds, samples, epoch)
        # A step that failed in validation and is repeated has left a record.
        while self._pending and self._pending[-1].step >= record.step:
            self._pending.pop()
        self._pending.append(record)
        self.write_final_steps()
        self._write_timeline()

    def _step_record(
        self, loss: float, seconds: float, samples: int, epoch: int | None
    ) -> StepRecord:
        """Return the record of the last step, without what its report has."""
        steps = self._steps
        memory = self._peak_memory() if self._prints() else {}
        tflops = None
        if self.flops_per_sample:
            flops = self.flops_per_sample * samples
            tflops = tflops_per_device(flops, seconds, steps.mesh.world.size)
        return StepRecord(
            step=steps.global_steps,
            consumed_samples=steps.consumed_samples,
            consumed_tokens=steps.consumed_samples * self.tokens_per_sample or None,
            loss=loss,
            lr=math.nan,
            epoch=epoch,
            step_seconds=seconds,
            samples_per_second=samples / seconds,
            tokens_per_second=self._tokens_per_second(samples, seconds),
            tflops_per_device=tflops,
            mfu=tflops / self._peak_tflops if tflops and self._peak_tflops else None,
            peak_gib=max(memory.values(), default=None),
            extra={
                **self._size(samples),
                **self._breakdown(),
                **self._compare_ranks(),
                **_shown(memory),
            },
        )

    def _size(self, samples: int) -> dict[str, float]:
        """Return the samples of a step, if `training.rampup_batch_size` changes their number."""
        return {} if self._config.training.rampup_batch_size is None else {"batch_size": samples}

    def _tokens_per_second(self, samples: int, seconds: float) -> float | None:
        if not self.tokens_per_sample:
            return None
        return samples * self.tokens_per_sample / seconds if seconds else math.nan

    def add_epoch(self, sums: EpochSums) -> EpochRecord:
        """Record the epoch that the run has just completed; return the record."""
        steps = self._steps
        record = EpochRecord(
            step=steps.global_steps,
            consumed_samples=steps.consumed_samples,
            epoch=steps.epoch,
            steps=sums.steps,
            samples=sums.samples,
            loss=sums.mean_loss,
            seconds=sums.seconds,
            tokens_per_second=self._tokens_per_second(sums.samples, sums.seconds),
        )
        self.monitor.write(record)
        return record

    def write_final_steps(self) -> None:
        """Write the records of all steps whose reports are available.

        Raises:
            NonFiniteError: a step was skipped that `training.on_nonfinite` does not allow to skip.
        """
        while self._reports:
            report = self._reports.popleft()
            record = self._pending.popleft()
            if not (math.isfinite(record.loss) and math.isfinite(report.grad_norm)):
                self.history.nan_steps += 1
            extra = dict(record.extra) | self._steps.experts.metrics(report.extra)
            self._add_loads(record.step, report.extra)
            if self._config.pipeline.optimizer_sync == "post_validate":
                extra["rollbacks"] = report.rollbacks
            self.monitor.write(
                replace(
                    record,
                    lr=report.learning_rate,
                    grad_norm=report.grad_norm,
                    loss_scale=report.loss_scale if self._config.fp16.enabled else None,
                    skipped_steps=report.skipped_steps,
                    nan_steps=self.history.nan_steps,
                    num_zeros=report.num_zeros,
                    params_norm=report.params_norm,
                    extra=extra,
                )
            )
            self._check_spike(record.step, report.loss)
            if report.origin:
                what = report.in_words(record.step)
                values = {"skipped_steps": report.skipped_steps}
                self.event("nonfinite", values, f"{what}: {report.origin}")
                self.policy.on_skip(what, report.origin)

    def _write_timeline(self) -> None:
        """Write the timeline of this step if it was traced; on rank 0."""
        steps, tracer = self._steps, self._steps.tracer
        trace = None if tracer is None else tracer.last_trace
        if trace is None or trace.step != steps.global_steps:
            return
        configured = self._config.monitor.trace.folder
        folder = Path(configured) if configured else self.folder.on_rank0() / "timelines"
        write = load_name("pipemega.profiling.measured_costs:write_timeline")
        self.monitor.write(write(trace, folder, steps.consumed_samples, self._log))

    def _add_loads(self, step: int, sums: tuple[float, ...]) -> None:
        experts = self._steps.experts
        if not (sums and self._keeps_files) or self._steps.mesh.rank > 0:
            return
        if self._loads is None:
            history = load_name("pipemega.pipeline.visualize.expert_loads:ExpertLoads")
            self._loads = history(experts.layers, experts.num_experts)
        self._loads.add(step, [row[: experts.num_experts] for row in experts.rows(sums)])

    def write_loads(self) -> None:
        """Write the picture of the loads of experts, if it has new steps; on rank 0."""
        if self._loads is None or not self._loads.has_new_steps:
            return
        path = self.folder.on_rank0() / "expert_loads" / f"from-step-{self._loads.first_step}.png"
        try:
            if self._loads.write(path):
                self.write(PictureRecord, picture_name="moe/loads", picture=path)
        except OSError as error:
            self._log.warning("the picture of the loads could not be written: %s", error)

    def _prints(self) -> bool:
        every = self._config.steps_per_print or 0
        return every > 0 and self._steps.global_steps % every == 0

    def _breakdown(self) -> dict[str, float]:
        if not self._config.wall_clock_breakdown:
            return {}
        elapsed = self._steps.timers.totals()
        seconds = {name: total - self._elapsed.get(name, 0.0) for name, total in elapsed.items()}
        self._elapsed = elapsed
        if self._prints():
            self._log.info(breakdown_line(self._steps.global_steps, seconds))
        return breakdown_scalars(seconds)

    def _peak_memory(self) -> dict[str, float]:
        """Return the peak GiB of each rank: allocated on a GPU, of the process on a CPU."""
        mesh = self._steps.mesh
        if mesh.device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(mesh.device))
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        if self._config.memory_breakdown:
            self._log.info(f"memory of rank {mesh.rank}: peak {peak / 2**30:.2f} GiB")
        own = torch.tensor([peak / 2**30], dtype=torch.float64)
        gathered = [own]
        if mesh.world.size > 1:
            gathered = [torch.empty_like(own) for _ in mesh.world.ranks]
            dist.all_gather(gathered, own, group=mesh.world.group)
        peaks = torch.cat(gathered).tolist()
        return {f"memory/rank{rank}_gib": peak for rank, peak in enumerate(peaks)}

    # Events

    def event(self, name: str, values: Mapping[str, float], text: str) -> None:
        """Write an event record."""
        self.write(EventRecord, name=name, values=values, text=text)

    def write(self, kind: Callable[..., Record], **fields: Any) -> None:
        """Write a record of this kind at the current step."""
        step, samples = self._steps.global_steps, self._steps.consumed_samples
        self.monitor.write(kind(step=step, consumed_samples=samples, **fields))

    def warn(self, text: str) -> None:
        """Log a warning on rank 0."""
        if self._steps.mesh.rank == 0:
            self._log.warning(text)

    def log_end(self, first_step: int, stopped: str, times: RunTimes) -> None:
        """Log the last line of the run, with its counters.

        Args:
            first_step: steps before this process.
            stopped: why the run ends early; empty if it does not.
        """
        steps = self._steps
        self.write_loads()
        done, total = steps.global_steps, steps.data.total_steps
        end = f"stopped ({stopped}) after" if stopped else "finished"
        of = "" if total is None else f" of {total}"
        epochs = (
            "" if steps.data.epochs is None else f" ({steps.epoch} of {steps.data.epochs} epochs)"
        )
        here = f", {done - first_step} of them in this process" if first_step else ""
        summary = self.history.summary(steps.skipped_steps)
        self._log.info(f"{end} step {done}{of}{epochs}{here}: {summary}; {times}")
        if stopped and self._config.checkpoint.save is None:
            self.warn("the run was not saved: checkpoint.save is not set")

    def _check_spike(self, step: int, loss: float) -> None:
        spike = self._spikes.add(loss)
        if spike is None:
            return
        self.history.spikes += 1
        text = (
            f"loss {spike.loss:.4f} at step {step} is a spike: the median of the previous steps is "
            f"{spike.median:.4f}, the bound {spike.bound:.4f} "
            f"(training.loss_spikes.factor {self._config.training.loss_spikes.factor:g})"
        )
        self.warn(text)
        self.event("loss_spike", {"loss": spike.loss, "bound": spike.bound}, text)

    def _compare_ranks(self) -> dict[str, float]:
        """Return the work times of all ranks every few steps, and warn of stragglers."""
        steps, watch = self._steps, self._stragglers
        summary = watch.add(steps.busy_time.seconds)
        if summary is None:
            return {}
        warning = watch.warning(summary, steps.plan)
        if warning:
            self.warn(warning)
            self.event("straggler", summary.scalars(), warning)
        return summary.scalars()


def _shown(memory: Mapping[str, float]) -> Mapping[str, float]:
    return memory if len(memory) <= SHOWN_RANKS else {}
