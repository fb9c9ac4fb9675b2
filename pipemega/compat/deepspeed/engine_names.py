"""DeepSpeed's names for what an engine of pipemega has; both kinds of engines share them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from pipemega.checkpoint import any_checkpoint
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.compat.deepspeed.schedule_adapter import given_schedule
from pipemega.distributed.mesh import from_first
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger

# Names of DeepSpeed's engine that do not exist here -> what to use.
_ADVICE: Mapping[str, str] = {
    "allreduce_gradients": "step() reduces the gradients",
    "set_train_batch_size": "set train_batch_size in the config",
    "set_train_micro_batch_size": "set train_micro_batch_size_per_gpu in the config",
    "offload_states": "set zero_optimization.offload_optimizer in the config",
    "reload_states": "set zero_optimization.offload_optimizer in the config",
    "flops_profiler": "set flops_profiler in the config",
    "set_custom_curriculum_learning_schedule": "curriculum learning does not exist",
    "curriculum_scheduler": "curriculum learning does not exist",
    "random_ltd_scheduler": "random layer token drop does not exist",
    "progressive_layer_drop": "progressive layer drop does not exist",
    "eigenvalue": "eigenvalue computation does not exist",
}


class EngineNames:
    """Reads and saves the engine `core` under DeepSpeed's names.

    Attributes:
        core: the engine that does the work, with the names of pipemega.
        config: as given to `initialize`.
        training_dataloader: of the training data given to `initialize`, else None.
    """

    core: Engine
    config: Any = None
    training_dataloader: Any = None

    # Sizes and keys of the config

    def train_batch_size(self) -> int:
        return self.core.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.core.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.core.batch.num_microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch size, micro-batch size, gradient accumulation steps)."""
        batch = self.core.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.num_microbatches

    def gradient_clipping(self) -> float:
        return self.core.config.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.core.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.core.config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        return self.core.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.core.config.bf16.enabled

    def wall_clock_breakdown(self) -> bool:
        return self.core.config.wall_clock_breakdown

    def steps_per_print(self) -> int | None:
        return self.core.config.steps_per_print

    def loss_scale(self) -> float:
        """Return `fp16.loss_scale`; 0 for a dynamic scale, whose value is `cur_scale`."""
        return self.core.config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self.core.config.fp16.enabled and self.core.config.fp16.loss_scale == 0

    # Ranks

    @property
    def device(self) -> torch.device:
        return self.core.mesh.device

    @property
    def global_rank(self) -> int:
        return self.core.mesh.rank

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        return self.core.mesh.world.size

    @property
    def dp_world_size(self) -> int:
        return self.core.mesh.data.size

    @property
    def mp_world_size(self) -> int:
        return self.core.mesh.tensor.size

    def get_data_parallel_rank(self) -> int:
        return self.core.mesh.data.rank

    def get_model_parallel_rank(self) -> int:
        return self.core.mesh.tensor.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    # The state of the run

    @property
    def optimizer(self) -> Optimizer | None:
        """torch's optimizer, over the master weights if they exist; that of the caller, if given.

        Do not call its `step()`: the engine does.
        """
        return self.core.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler; that of the caller, if given. The engine calls its `step()`."""
        return given_schedule(self.core.lr_scheduler)

    @property
    def global_steps(self) -> int:
        return self.core.global_steps

    @property
    def global_samples(self) -> int:
        return self.core.consumed_samples

    @property
    def skipped_steps(self) -> int:
        return self.core.skipped_steps

    @property
    def cur_scale(self) -> float:
        """The loss scale of the last step; 1 without fp16."""
        report = self.core.last_step
        return 1.0 if report is None else report.loss_scale

    def get_lr(self) -> list[Any]:
        return self._group_options("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        return self._group_options("type")

    def _group_options(self, name: str) -> list[Any]:
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step before clipping; None before the first."""
        return self.core.get_global_grad_norm()

    def was_step_applied(self) -> bool:
        """Return whether the last step has changed the parameters."""
        report = self.core.last_step
        return report is not None and not report.skipped

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint in pipemega's format; see `Engine.save_checkpoint`.  Collective.

        Args:
            client_state: tensors and plain values; that of rank 0 is saved.
            exclude_frozen_parameters: refused if true.
        """
        if exclude_frozen_parameters:
            raise ConfigError(
                "save_checkpoint(exclude_frozen_parameters=True): a checkpoint has all parameters, "
                "so that it can be loaded alone: remove the argument",
                on_every_rank=True,
            )
        state = dict(client_state) if client_state else None
        self.core.save_checkpoint(save_dir, None if tag is None else str(tag), state, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint of pipemega; of another number of ranks too.  Collective.

        Returns:
            the path of the checkpoint, and its client_state; (None, None) if `load_dir` has no
            checkpoint and no `tag` is given.

        Raises:
            CheckpointError: as `Engine.load_checkpoint`.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) does not exist: load the state_dict into "
                "engine.module yourself before initialize()",
                on_every_rank=True,
            )
        world = self.core.mesh.world
        if tag is None and from_first(world, lambda: _is_empty(load_dir)):
            get_logger(world.rank).warning(
                f"load_checkpoint: {load_dir} has no checkpoint, so nothing is loaded"
            )
            return None, None
        path, client = self.core.load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            load_module_only=load_module_only,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            strict=load_module_strict,
        )
        return str(path), {} if client is None else client

    def destroy(self) -> None:
        """End the run; see `Engine.close`.  Collective."""
        self.core.close()


def _is_empty(folder: str) -> bool:
    return any_checkpoint(folder) is None and find_deepspeed(Path(folder), None) is None


def missing_name(name: str, more: Mapping[str, str]) -> str:
    """Return the text about a name of DeepSpeed's engine that does not exist.

    Args:
        more: name -> what to use, of one kind of engines.
    """
    advice = {**_ADVICE, **more}.get(name)
    text = f"this engine over pipemega has no {name!r}"
    if advice is not None:
        return f"{text}: {advice}"
    return f"{text}; docs/from_deepspeed.md lists the names that exist"
