"""What both DeepSpeed engines have: getters of config and optimizer, checkpoints.

The client state of DeepSpeed scripts as values that a checkpoint can contain, and back.

Scripts save argparse namespaces, numpy arrays and numbers with it; a checkpoint contains tensors
and plain values only, so that loading it runs no code.

Schedulers of the caller: torch's, and others that have a method `step`.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pipemega.checkpoint import any_checkpoint
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.compat.deepspeed.virtual_modules import ENGINE_ADVICE
from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.mesh import from_first
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.optimizer.lr_schedules import SchedulerMaker, TorchSchedule
from pipemega.storage.filesystem import is_remote

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a micro-batch of a list of samples."""


class _Timer:
    """`engine.tput_timer`: `wall_clock_breakdown` and the records of each step have the rates."""

    def update_epoch_count(self) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Do nothing."""


class DeepSpeedEngine:
    """What both DeepSpeed engines have, over a `pipemega.Engine`.

    Attributes:
        pipemega_engine: does the work.
        pipemega_config, mesh: the config and the device mesh of the run.
        optimizer: torch's optimizer, over the master weights if they exist, or the optimizer of the
            script; None if there is no optimizer.
    """

    _advice: Mapping[str, str]
    """Name that this kind of engine does not have -> what to use."""

    def _use(self, engine: Engine) -> None:
        self.pipemega_engine, self.pipemega_config = engine, engine.config
        self.mesh, self.optimizer = engine.mesh, engine.optimizer

    def _missing(self, name: str) -> AttributeError:
        advice = {**ENGINE_ADVICE["DeepSpeedEngine"], **self._advice}
        text = advice.get(name, "docs/coming_from.md lists the names that exist")
        return AttributeError(f"the engine has no {name!r}: {text}")

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.pipemega_engine.global_steps

    # Ranks

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world.size

    @property
    def dp_world_size(self) -> int:
        return self.mesh.data.size

    @property
    def local_rank(self) -> int:
        return launch_variables().number("LOCAL_RANK", 0)

    @property
    def is_model_parallel(self) -> bool:
        return self.mesh.tensor.size > 1

    @property
    def mp_world_size(self) -> int:
        return self.mesh.tensor.size

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.rank

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tensor.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    # Batch

    def train_batch_size(self) -> int:
        """Return the samples of a step on all data ranks."""
        return self.pipemega_engine.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.pipemega_engine.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step of one data rank."""
        return self.pipemega_engine.batch.num_microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch size, micro-batch size, gradient accumulation steps)."""
        batch = self.pipemega_engine.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.num_microbatches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse another batch size during the run.

        Raises:
            ConfigError: it differs from the train batch size of the config.
        """
        if train_batch_size != self.train_batch_size():
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): the steps have "
                f"{self.train_batch_size()} samples; set train_batch_size in the config, or let it "
                "grow with training.rampup_batch_size",
                on_every_rank=True,
            )

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        return self.global_steps * self.gradient_accumulation_steps()

    # Sections of the config

    @property
    def config(self) -> dict[str, Any]:
        return self.pipemega_config.to_dict()

    def zero_optimization_stage(self) -> int:
        return self.pipemega_config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        return self.pipemega_config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.pipemega_config.bf16.enabled

    def loss_scale(self) -> float:
        """Return `fp16.loss_scale`; 0 for a dynamic scale, whose value is `cur_scale`."""
        return self.pipemega_config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.loss_scale() == 0

    def gradient_clipping(self) -> float:
        return self.pipemega_config.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self.pipemega_config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.pipemega_config.wall_clock_breakdown

    @property
    def tput_timer(self) -> _Timer:
        return _Timer()

    # What exists in DeepSpeed only: scripts ask whether it is on

    has_moe_layers = False

    def _is_off(self) -> bool:
        """Return False: it does not exist here."""
        return False

    zero_optimization_partition_weights = zero_optimization_partition_gradients = _is_off
    random_ltd_enabled = curriculum_enabled_legacy = curriculum_learning_enabled = _is_off
    pld_enabled = amp_enabled = _is_off

    def get_additional_losses(self) -> None:
        """Return None: there is one loss."""
        return

    # Optimizer

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; without empty first groups."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return the betas or the momentum of each parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def cur_scale(self) -> float:
        """The loss scale of the last step; 1 before the first, and without fp16."""
        report = self.pipemega_engine.last_step
        return 1.0 if report is None else report.loss_scale

    @property
    def skipped_steps(self) -> int:
        return self.pipemega_engine.skipped_steps

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step before clipping; None before the first."""
        return self.pipemega_engine.get_global_grad_norm()

    def was_step_applied(self) -> bool:
        """Return whether the last step has changed the parameters."""
        report = self.pipemega_engine.last_step
        return report is not None and not report.skipped

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the script or of the config; None: the learning rate is constant."""
        found = self.pipemega_engine.lr_scheduler
        if not isinstance(found, TorchSchedule):
            return found
        given = found.scheduler
        return given.scheduler if isinstance(given, _IncrementedSchedule) else given

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.pipemega_engine.set_lr_scheduler(lambda _: scheduler)

    def _report_to_optimizer(self) -> None:
        """Give the optimizer what DeepSpeed's optimizers say about the last step."""
        report = self.pipemega_engine.last_step
        if self.optimizer is not None:
            scale, overflow = self.cur_scale, report is not None and report.skipped
            vars(self.optimizer).update(cur_scale=scale, loss_scale=scale, overflow=overflow)

    # Data

    def _sampler(self, dataset: Any, *, shuffle: bool) -> DistributedSampler[Any]:
        """Return the samples of this data rank: every data-th one."""
        return DistributedSampler(
            dataset, self.mesh.data.size, self.mesh.data.rank, shuffle=shuffle
        )

    def _loader(
        self,
        dataset: Any,
        sampler: Any,
        collate_fn: Collate | None,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        pin_memory: bool = True,
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches; None: the value of the config."""
        config = self.pipemega_config
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=config.data.num_workers if workers is None else workers,
            pin_memory=pin_memory and self.mesh.device.type == "cuda",
            drop_last=config.dataloader_drop_last,
        )

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run in pipemega's format, which loads on any mesh; return True.  Collective.

        Args:
            client_state: state of the caller, the same on every rank: tensors, numbers, text,
                containers of them, argparse namespaces and numpy arrays.
            exclude_frozen_parameters: has no effect: all parameters are saved.
        """
        self.pipemega_engine.save_checkpoint(
            save_dir, None if tag is None else str(tag), encoded(client_state or {}), save_latest
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """Load a checkpoint of `save_checkpoint`, or the weights of one of DeepSpeed.  Collective.

        Returns:
            its path and client state; (None, None), with a warning, if `load_dir` has no checkpoint
            and no `tag` is given.

        Raises:
            ConfigError: custom_load_fn.
            CheckpointError: in the same cases as `pipemega.Engine.load_checkpoint`.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported: load_module_strict=False "
                "loads the parameters that match",
                on_every_rank=True,
            )
        world = self.pipemega_engine.mesh.world
        if tag is None and from_first(world, lambda: _is_empty(load_dir)):
            if world.rank == 0:
                get_logger().warning(f"{load_dir} has no checkpoint: nothing is loaded")
            return None, None
        path, client = self.pipemega_engine.load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            load_module_only=load_module_only,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            strict=load_module_strict,
        )
        return str(path), decoded(client) or {}

    def destroy(self) -> None:
        """End the run; see `pipemega.Engine.close`.  Collective."""
        self.pipemega_engine.close()


_NAMESPACE, _ARRAY = "argparse.Namespace", "numpy.ndarray"


def encoded(value: Any) -> Any:
    """Return `value` with namespaces and arrays as tagged dicts."""
    if isinstance(value, Namespace):
        return {_NAMESPACE: encoded(vars(value))}
    if isinstance(value, np.ndarray) and value.dtype != object:
        stored = value.astype(_stored_dtype(value.dtype))
        return {_ARRAY: torch.from_numpy(stored), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: encoded(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(encoded(part) for part in value)
    return value


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(value, dict):
        if value.keys() == {_NAMESPACE}:
            return Namespace(**decoded(value[_NAMESPACE]))
        if value.keys() == {_ARRAY, "dtype"}:
            return value[_ARRAY].numpy().astype(value["dtype"])
        return {key: decoded(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(decoded(part) for part in value)
    return value


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for torch, which has few operations for unsigned integers."""
    return np.dtype(np.int64) if dtype.kind == "u" and dtype.itemsize < 8 else dtype


def _is_empty(folder: str | Path) -> bool:
    if any_checkpoint(folder) is not None:
        return False
    return is_remote(folder) or find_deepspeed(folder) is None


class _IncrementedSchedule:
    """A scheduler whose `step` takes the number of samples, as Megatron's do.

    Args:
        scheduler: the caller's scheduler.
        increment: samples of each step.
    """

    def __init__(self, scheduler: Any, increment: int) -> None:
        self.scheduler, self._increment = scheduler, increment
        self.state_dict = scheduler.state_dict
        self.load_state_dict = scheduler.load_state_dict
        if hasattr(scheduler, "optimizer"):
            self.optimizer = scheduler.optimizer

    def step(self) -> None:
        self.scheduler.step(self._increment)


def schedule_maker(scheduler: Any, train_batch_size: int) -> SchedulerMaker | None:
    """Return what `pipemega.initialize` takes for the `lr_scheduler` of `deepspeed.initialize`.

    Args:
        scheduler: a scheduler over the caller's optimizer, or a function of the optimizer.
        train_batch_size: passed to a `step` that needs an argument.
    """
    if scheduler is None:
        return None

    def make(optimizer: Optimizer) -> Any:
        is_scheduler = hasattr(scheduler, "step")
        made = scheduler if is_scheduler or not callable(scheduler) else scheduler(optimizer)
        step = getattr(made, "step", None)
        if callable(step) and _needs_argument(step) and not isinstance(made, ReduceLROnPlateau):
            return _IncrementedSchedule(made, train_batch_size)
        return made

    return make


def _needs_argument(step: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    return any(p.kind in kinds and p.default is p.empty for p in parameters)
