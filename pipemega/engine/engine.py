"""The engine that `pipemega.initialize` returns: steps, and the run that the config describes."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh, gather_objects, on_all_ranks
from pipemega.engine.batch_reader import StepData
from pipemega.engine.checkpointed_engine import CheckpointedEngine
from pipemega.engine.components import Components
from pipemega.engine.evaluation import OnOutput
from pipemega.engine.training_data import evaluation_loader
from pipemega.engine.training_run import TrainingRun
from pipemega.errors import ConfigError, StopTraining
from pipemega.fault_tolerance.error_propagation import RunProgress, register_progress
from pipemega.optimizer.lr_schedules import SchedulerMaker, TorchSchedule
from pipemega.pipeline.model.stages import gather_full_tensors
from pipemega.pipeline.plan.instructions import Plan

_Outputs = TypeVar("_Outputs")


class Engine(CheckpointedEngine):
    """Trains a model; returned by `pipemega.initialize`.

    `train_batch` also does what the config asks of a run (docs/long_runs.md): it writes records,
    saves checkpoints, applies `training.on_nonfinite`, and ends the run after a signal or at a time
    limit. If no such key is set, it only trains.

    Attributes:
        run: records, counters and checkpoints of the run.
        client_state: saved with each checkpoint for which `save_checkpoint` gets no other state;
            set by the caller, and by `load_checkpoint`.
    """

    def __init__(self, config: Config, mesh: Mesh, plan: Plan, components: Components) -> None:
        super().__init__(config, mesh, plan, components)
        self.client_state: Any = None
        self.run = TrainingRun(self)
        self._saved_in = config.checkpoint.save
        register_progress(self._progress)

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        *,
        batch: Any = None,
        return_outputs: bool = False,
    ) -> Any:
        """Train one step on one global batch.

        With `training.on_nonfinite.policy: "rollback"`, a step with inf or nan loads the newest
        checkpoint, and the next batch is trained: `global_steps` may be lower afterwards.

        Args:
            data_iter: yields the (inputs, labels) of this data rank's micro-batches; read on the
                pipeline ranks of the first and the last stage. None: the training data given to
                `initialize`.
            batch: instead of an iterator: (inputs, labels), pytrees of tensors with the
                train_batch_size / mesh.data samples of this data rank along dim 0, which are cut
                into micro-batches.
            return_outputs: also return the outputs of the last layer.

        Returns:
            the loss, averaged over the whole batch; the same on every rank. Or (loss, outputs):
            a list with the detached outputs of each micro-batch that has samples on the ranks of
            the last stage (a shard per tensor rank if the layer returns shards), else None.

        Raises:
            StopIteration: no data is left.
            ConfigError: there is no data, or `batch` cannot be cut into the micro-batches of a
                step; on every rank.
            StopTraining: a signal or `training.exit_after_minutes` ends the run; it is saved.
            DataError: the data ended within this batch; or the ranks of a data rank have read
                different data (config key data.compare_every).
            PipelineError: a layer or another rank failed; or as `settle`.
            ReplicaError: copies of a parameter differ (`training.check_replicas_every`).
        """
        outputs: list[Any] | None = None

        def train() -> float:
            nonlocal outputs
            loss, outputs = self._train_batch(data_iter, batch, return_outputs)
            return loss

        with self._failures.propagate_errors("train_batch"):
            if batch is not None and data_iter is not None:
                raise ConfigError("train_batch() takes an iterator or a batch, not both")
            loss = self.run.train_step(train, data_iter, has_next=batch is None)
        if self.run.stopped:
            raise StopTraining(self.run.stopped)
        return (loss, outputs) if return_outputs else loss

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the calls of a loop without a pipeline: `engine(x)`, `backward`, `step`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine(x), engine.forward, engine.backward and engine.step do not exist with a "
            "pipeline: train_batch() does them for all micro-batches of a step; for outputs use "
            "infer(x), for a loss without gradients eval_batch(iterator)"
        )

    forward = backward = step = __call__

    def eval_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        num_micro_batches: int | None = None,
        *,
        batch: Any = None,
        return_outputs: bool = False,
        on_output: OnOutput | None = None,
        split: str = "validation",
    ) -> Any:
        """Compute the loss on some micro-batches, without gradients, and record it.

        Args:
            data_iter: as for `train_batch`; micro-batches may have any size.
            num_micro_batches: how many to read; by default as many as in a training step.
            batch: instead of an iterator: (inputs, labels), pytrees of tensors with any number of
                samples along dim 0. They are cut into micro-batches; the last may be smaller.
            return_outputs: also return the outputs of the last layer.
            on_output: called with the (outputs, labels) of each micro-batch, in order, on the ranks
                of the last stage.
            split: name of the data in the records: "validation" or "test".

        Returns:
            the loss, the same on every rank; or (loss, outputs). `outputs` is a list on the ranks
            of the last stage (a shard per tensor rank if the layer returns shards), else None. A
            mean loss of a `batch` is averaged over its samples; that of an iterator over its
            micro-batches.
        """

        def evaluate() -> tuple[float, list[Any] | None]:
            if (data_iter is None) == (batch is None):
                raise ConfigError(
                    "eval_batch() needs either an iterator over micro-batches (inputs, labels), or "
                    "batch=(inputs, labels)"
                )
            if data_iter is None:
                data = self._reader.evaluation_batch(batch)
            else:
                count = num_micro_batches or self.batch.num_microbatches
                data = self._reader.next_evaluation(iter(data_iter), count)
            return self._evaluator.batch(data, keep_outputs=return_outputs, on_output=on_output)

        loss, outputs = self._recorded("eval_batch", evaluate, split)
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self,
        data: Any,
        num_batches: int | None = None,
        *,
        on_output: OnOutput | None = None,
        on_batch: Callable[[int], object] | None = None,
        numbers: Callable[[], Mapping[str, float]] | None = None,
        split: str = "validation",
    ) -> float:
        """Compute the loss on a data set, one global batch after the other, and record it once.

        Args:
            data: a dataset, iterable or DataLoader, as the `training_data` of `initialize`, read in
                its own order; or a BatchLoader, which continues at its position.
            num_batches: global batches to read; the data repeats if it has fewer. None: read the
                data once, with a partial batch at its end.
            on_output: as for `eval_batch`.
            on_batch: called on every rank after each global batch, with its number of samples.
            numbers: called on every rank after the last micro-batch; returns numbers for the
                record, by name.
            split: name of the data in the records.

        Returns:
            the mean over all samples (or over the weights of a WeightedLoss), the same on every
            rank.

        Raises:
            ConfigError: a BatchLoader that repeats its data, without `num_batches`.
            StopIteration: a BatchLoader ended before `num_batches`.
        """

        def evaluate() -> tuple[float, None]:
            if isinstance(data, BatchLoader):
                return self._evaluator.over(data, num_batches, on_output, on_batch), None
            whole = num_batches is None
            with closing(evaluation_loader(self.config, self.mesh, data, whole=whole)) as loader:
                return self._evaluator.over(loader, num_batches, on_output, on_batch), None

        return self._recorded("evaluate", evaluate, split, numbers)[0]

    def _recorded(
        self,
        name: str,
        evaluate: Callable[[], tuple[float, _Outputs]],
        split: str,
        numbers: Callable[[], Mapping[str, float]] | None = None,
    ) -> tuple[float, _Outputs]:
        """Call `evaluate` when the last step is final, and record the loss that it returns."""
        self.run.settle_before_evaluation()
        started = time.perf_counter()
        with self._failures.propagate_errors(name):
            self._settle()
            loss, outputs = evaluate()
            metrics = {} if numbers is None else numbers()
        self.run.add_evaluation(loss, time.perf_counter() - started, split, metrics)
        return loss, outputs

    def infer(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the output of the last layer for each micro-batch; None on other stages' ranks."""
        with self._failures.propagate_errors("infer"):
            self._settle()
            data = StepData(self._reader.to_device(inputs), [], len(inputs))
            return self._evaluator.outputs(data)

    def reset_shapes(self) -> None:
        """Let the next micro-batches have other shapes than the ones before; on every rank.

        For `pipeline.shapes: "cached"`, in which a change of the shapes is an error otherwise.
        """
        self._settle()
        self._executor.forget_shapes()

    def set_lr_scheduler(self, lr_scheduler: SchedulerMaker) -> None:
        """Replace the learning-rate schedule, as `initialize(lr_scheduler=...)`.

        Raises:
            ConfigError: there is no optimizer, or it returns no scheduler over `optimizer`.
        """
        with self._failures.propagate_errors("set_lr_scheduler"):
            self._settle()
            if self._step is None:
                raise ConfigError(
                    "set_lr_scheduler() needs an optimizer: add the section 'optimizer'",
                    on_every_rank=True,
                )
            by = "step" if self.config.scheduler is None else self.config.scheduler.by
            make = partial(TorchSchedule, self._step.optimizer, lr_scheduler, by)
            self._step.schedule = on_all_ranks(self.mesh.world, make)
            self.lr_scheduler = self._step.schedule

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping; None before the first. Not collective."""
        return self.last_step.grad_norm if self.last_step else None

    @torch.no_grad()
    def parameter_state(self) -> dict[str, Tensor]:
        """Return logical name -> full parameter, on the CPU of every rank; for small models.

        With bf16 or fp16, the fp32 master weight.
        """
        with self._failures.propagate_errors("parameter_state"):
            self._settle()
            values = {n: p.detach() for n, p in self._model.parameters.items()}
            if self._step is not None:
                values |= self._step.masters.gather_masters()
            return gather_full_tensors(values, self._model, self.mesh)

    @torch.no_grad()
    def buffer_state(self) -> dict[str, Tensor]:
        """Return logical name -> persistent buffer of the first data rank, on every rank's CPU."""
        with self._failures.propagate_errors("buffer_state"):
            buffers = self._model.persistent_buffers
            is_first = self.mesh.data.rank == 0 and self.mesh.tensor.rank == 0
            local = {n: b.cpu() for n, b in buffers.items()} if is_first else {}
            parts = gather_objects(local, self.mesh.world)
            return {name: buffer.clone() for part in parts for name, buffer in part.items()}

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Save a checkpoint with the complete state of the run; return its path.

        With `checkpoint.async` this method copies the state and returns; a background thread writes
        the files. If writing fails, the next call reports it: `finish_saving` raises the error,
        `save_checkpoint` logs it and then saves synchronously.

        If `checkpoint.interval` has just saved this step in this folder, and neither `tag` nor
        `client_state` is given, nothing is written again.

        Args:
            save_dir: a folder on a file system that all ranks share, or an fsspec URL.
            tag: name of the checkpoint; default: `global_step<N>`.
            client_state: state of the caller, returned by `load_checkpoint`: tensors and plain
                values, the same on every rank; None: the attribute `client_state`.
            save_latest: make this the checkpoint that `load_checkpoint` loads by default.

        Raises:
            ConfigError: `save_dir` is no path.
            CheckpointError: a rank could not write its files; earlier checkpoints are unchanged.
        """
        if not isinstance(save_dir, str | os.PathLike):
            raise ConfigError(
                f"save_checkpoint() takes a folder as save_dir, not {save_dir!r}: give a path"
            )
        if tag is None and client_state is None:
            saved = self.run.saved_automatically(save_dir)
            if saved is not None:
                return saved
        self._saved_in = os.fspath(save_dir)
        with self._failures.propagate_errors("save_checkpoint"):
            self.run.before_save()
        state = self.client_state if client_state is None else client_state
        path = super().save_checkpoint(save_dir, tag, state, save_latest)
        if save_latest:
            self.run.record_save(save_dir)
        return path

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        strict: bool = True,
    ) -> tuple[Path | str, Any]:
        """Load a checkpoint; a run on another mesh may have saved it.

        The records continue after the step of the checkpoint: lines of later steps are dropped.

        Args:
            load_dir: the `save_dir` of `save_checkpoint`.
            tag: name of the checkpoint; default: the newest complete one. If newer ones are
                incomplete or damaged, a warning lists them.
            load_module_only: load only parameters and buffers; the run starts at step 0.
            load_optimizer_states: if False, keep the current optimizer state.
            load_lr_scheduler_states: if False, keep the current learning rate.
            strict: if False, load the parameters that match, and log every difference.

        Returns:
            the path of the checkpoint, and its client_state.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged, or it was saved with
                another model or another order of the data.
        """
        path, self.client_state = super().load_checkpoint(
            load_dir,
            tag,
            load_module_only=load_module_only,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            strict=strict,
        )
        if not load_module_only:
            self.run.record_load(load_dir)
        return path, self.client_state

    def close(self) -> None:
        """End the run: write the last records, save to `checkpoint.save` if this step was not
        saved, and close the sinks.

        `pipemega.run` calls it when the script ends without an error. Without `pipemega.run`, call
        it after the last step.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
        """
        with self._failures.propagate_errors("close"):
            self.run.close()
            self._checkpoints.wait()

    def _progress(self) -> RunProgress:
        """Return what an error message says about this run."""
        config = self.config
        resumes = config.training.resume == "auto" and self._saved_in == config.checkpoint.save
        return RunProgress(self.global_steps, self._saved_in, resumes)

    def _run_state(self) -> dict[str, Any]:
        return self.run.state_dict()

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        self.run.load_state_dict(state)
