"""The loop that users script: train, evaluate, show, save."""

import math
import resource
import time
from collections import deque
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemega.checkpoint import is_remote
from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.engine import Engine
from pipemega.errors import ConfigError
from pipemega.monitor import (
    EvalRecord,
    Monitor,
    ResumePoint,
    StepRecord,
    breakdown_line,
    breakdown_scalars,
    build_sinks,
    get_logger,
    peak_tflops,
    tflops_per_device,
)
from pipemega.training.timelines import write_timeline


class Trainer:
    """Trains an engine for `training.train_steps` steps, from where it stands.

    Args:
        engine: from `pipemega.initialize`, with training data.
        valid: held-out data of the same kind; None skips evaluation.
        tokens_per_sample, flops_per_token: for tokens/s, TFLOP/s and MFU; 0 leaves them out.

    Attributes:
        monitor: where records go; on rank 0 only.
        validation: (step, loss) of each evaluation so far.
    """

    def __init__(
        self,
        engine: Engine,
        valid: Any = None,
        *,
        tokens_per_sample: int = 0,
        flops_per_token: float = 0.0,
    ) -> None:
        self.engine, self.config = engine, engine.config
        self.validation: list[tuple[int, float]] = []
        self._valid = valid
        self._tokens_per_sample, self._flops_per_token = tokens_per_sample, flops_per_token
        self._nan_steps = 0
        self._drafts: deque[StepRecord] = deque()  # of steps whose norm is not known yet
        self._log = get_logger(engine.mesh.rank)
        self._peak = self.config.monitor.peak_tflops or _device_peak(engine.mesh.device)
        state = self._resume()
        engine.settle()
        engine.take_reports()  # of steps that were not ours
        self._keep_config()
        self.monitor = self._open_monitor(state)

    def _resume(self) -> dict[str, Any]:
        """Loads `checkpoint.load`, if the config asks for it; returns the trainer's own state."""
        folder = self.config.checkpoint.load
        if folder is None:
            return {}
        settings = self.config.checkpoint
        path, client = self.engine.load_checkpoint(
            folder,
            settings.load_tag,
            load_module_only=settings.load_module_only,
            load_optimizer_states=settings.load_optimizer_states,
            load_lr_scheduler_states=settings.load_lr_scheduler_states,
            strict=settings.strict,
        )
        if settings.load_module_only:
            # A new run: the records of the other one are not its own.
            return {}
        state: dict[str, Any] = (client or {}).get("trainer", {})
        self._nan_steps = state.get("nan_steps", 0)
        self.validation = [(int(s), float(loss)) for s, loss in state.get("validation", [])]
        self._log.info(f"resumed from {path} at step {self.engine.global_steps}")
        return state

    def _keep_config(self) -> None:
        """The resolved config beside what the run writes, so that it can be run again."""
        if self.engine.mesh.rank == 0:
            folder = run_folder(self.config)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(self.config.to_json() + "\n", encoding="utf-8")

    def _open_monitor(self, state: dict[str, Any]) -> Monitor:
        engine = self.engine
        resume = None
        if engine.global_steps:
            resume = ResumePoint(engine.global_steps, engine.consumed_samples)
        return build_sinks(
            self.config,
            run_folder(self.config),
            is_main=engine.mesh.rank == 0,
            logger=self._log,
            resume=resume,
            state=state.get("monitor"),
        )

    def fit(self) -> float:
        """Runs to `training.train_steps`; returns the last training loss.

        Raises:
            ConfigError: training.train_steps is missing.
        """
        settings, engine = self.config.training, self.engine
        if settings.train_steps is None:
            raise ConfigError("training.train_steps is missing: how many steps shall be trained?")
        loss = math.nan
        try:
            if self._valid is not None and settings.eval_interval and not self.validation:
                self.evaluate()
            while engine.global_steps < settings.train_steps:
                loss = self.train_step()
                last = engine.global_steps == settings.train_steps
                if self._due(settings.eval_interval) or (last and settings.eval_interval):
                    self.evaluate()
                if self._due(self.config.checkpoint.interval) or last:
                    self.save()
            self.settle()
            engine.finish_saving()
        finally:
            self.monitor.close()
        return loss

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.engine.global_steps % interval == 0

    def train_step(self) -> float:
        """One optimizer step and its record; returns the loss."""
        engine, started = self.engine, time.perf_counter()
        loss = engine.train_batch()
        draft = self._draft(loss, time.perf_counter() - started)
        # A step that ended in an error, and is done again, has left one.
        while self._drafts and self._drafts[-1].step >= draft.step:
            self._drafts.pop()
        self._drafts.append(draft)
        self._write_decided()
        self._write_timeline()
        return loss

    def _draft(self, loss: float, seconds: float) -> StepRecord:
        """What is known of a step as soon as it has run."""
        engine = self.engine
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
            extra=self._breakdown(),
        )

    def _write_decided(self) -> None:
        """Writes the records of all steps that are decided.

        That is the last one, or with `pipeline.optimizer_sync: "post_validate"` the one before.
        """
        for report in self.engine.take_reports():
            draft = self._drafts.popleft()
            if not (math.isfinite(draft.loss) and math.isfinite(report.grad_norm)):
                self._nan_steps += 1
            extra = dict(draft.extra)
            if self.config.pipeline.optimizer_sync == "post_validate":
                extra["rollbacks"] = report.rollbacks
            self.monitor.write(
                replace(
                    draft,
                    lr=report.learning_rate,
                    grad_norm=report.grad_norm,
                    loss_scale=report.loss_scale if self.config.fp16.enabled else None,
                    skipped_steps=report.skipped_steps,
                    nan_steps=self._nan_steps,
                    extra=extra,
                )
            )

    def settle(self) -> None:
        """Writes the records of all steps so far, the last one included."""
        self.engine.settle()
        self._write_decided()

    def _write_timeline(self) -> None:
        """Of this step, if it was timed; on rank 0, which alone has it."""
        engine, trace = self.engine, self.engine.last_trace
        if trace is None or trace.step != engine.global_steps:
            return
        wanted = self.config.monitor.trace.folder
        folder = Path(wanted) if wanted else run_folder(self.config) / "timelines"
        self.monitor.write(write_timeline(trace, folder, engine.consumed_samples, self._log))

    def _prints(self) -> bool:
        return self._due(self.config.steps_per_print or 0)

    def _breakdown(self) -> dict[str, float]:
        if not self.config.wall_clock_breakdown:
            return {}
        seconds = self.engine.timers.lap()
        if self._prints():
            self._log.info(breakdown_line(self.engine.global_steps, seconds))
        return breakdown_scalars(seconds)

    def _memory(self) -> float:
        """Peak GiB of the fullest rank: on a GPU what was allocated, on a CPU the process."""
        mesh = self.engine.mesh
        if mesh.device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(mesh.device))
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        if self.config.memory_breakdown:
            self._log.info(f"memory of rank {mesh.rank}: peak {peak / 2**30:.2f} GiB")
        tensor = torch.tensor(peak, dtype=torch.float64, device=mesh.device)
        if mesh.world.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.world.group)
        return float(tensor.item()) / 2**30

    def evaluate(self) -> float:
        """The validation loss on the first `training.eval_steps` batches; the same each time."""
        self.settle()
        engine, started = self.engine, time.perf_counter()
        count = self.config.training.eval_steps * engine.batch.num_microbatches
        loader = self._validation_loader()
        try:
            loss = float(engine.eval_batch(islice(loader, count), count))
        finally:
            loader.close()
        self.validation.append((engine.global_steps, loss))
        self.monitor.write(
            EvalRecord(
                step=engine.global_steps,
                consumed_samples=engine.consumed_samples,
                loss=loss,
                seconds=time.perf_counter() - started,
            )
        )
        return loss

    def _validation_loader(self) -> BatchLoader:
        batch, mesh = self.engine.batch, self.engine.mesh
        return BatchLoader(
            self._valid,
            train_batch_size=batch.train_batch_size,
            micro_batch_size=batch.micro_batch_size,
            data_rank=mesh.data.rank,
            data_size=mesh.data.size,
            shuffle=False,
        )

    def save(self) -> None:
        """Writes a checkpoint into `checkpoint.save`, if the config names a folder."""
        folder = self.config.checkpoint.save
        if folder is None:
            return
        self.settle()
        state = {
            "monitor": self.monitor.state_dict(),
            "nan_steps": self._nan_steps,
            "validation": self.validation,
        }
        self.engine.save_checkpoint(folder, client_state={"trainer": state})


def run_folder(config: Config) -> Path:
    """Where a run leaves what it writes beside its checkpoints."""
    folder = config.checkpoint.save or "runs/latest"
    # What is written line by line has no place in an object store.
    return Path("runs", Path(folder).name) if is_remote(folder) else Path(folder)


def _device_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(device))
