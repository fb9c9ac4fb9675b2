"""What a DeepSpeed engine says about its config and its optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from pipemega.config import Batch, Config
from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError

_ADVICE: Mapping[str, str] = {
    "allreduce_gradients": "the engine reduces the gradients once per step",
    "set_train_micro_batch_size": "set train_micro_batch_size_per_gpu in the config",
    "offload_states": "set zero_optimization.offload_optimizer in the config",
    "reload_states": "set zero_optimization.offload_optimizer in the config",
    "curriculum_scheduler": "curriculum learning does not exist",
    "set_data_post_process_func": "curriculum learning does not exist",
    "random_ltd_scheduler": "random layer token drop does not exist",
    "progressive_layer_drop": "progressive layer drop does not exist",
    "monitor": "set wandb, tensorboard or csv_monitor in the config",
    "flops_profiler": "set flops_profiler in the config",
    "timers": "set wall_clock_breakdown in the config",
}


def missing_name(name: str, advice: Mapping[str, str]) -> AttributeError:
    """Return the error for a name that the engine does not have: says what to use.

    Args:
        advice: of the kind of engine.
    """
    text = {**_ADVICE, **advice}.get(name, "docs/from_deepspeed.md lists the names that exist")
    return AttributeError(f"the engine has no {name!r}: {text}")


class _Timer:
    """`engine.tput_timer`: `wall_clock_breakdown` and the records of each step have the rates."""

    def update_epoch_count(self) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Do nothing."""


class EngineSettings(ABC):
    """The getters of a DeepSpeed engine; `pipemega_config` and `mesh` have their values."""

    pipemega_engine: Engine
    pipemega_config: Config
    mesh: Mesh
    optimizer: Optimizer | None

    @property
    def _batch(self) -> Batch:
        return self.pipemega_config.batch(self.mesh.data.size)

    @property
    @abstractmethod
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""

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
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step of one data rank."""
        return self._batch.num_microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch size, micro-batch size, gradient accumulation steps)."""
        batch = self._batch
        return batch.train_batch_size, batch.micro_batch_size, batch.num_microbatches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse another batch size during the run.

        Raises:
            ConfigError: it is not that of the config.
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

    def _report_to_optimizer(self) -> None:
        """Give the optimizer what DeepSpeed's optimizers say about the last step."""
        report = self.pipemega_engine.last_step
        if self.optimizer is not None:
            scale, overflow = self.cur_scale, report is not None and report.skipped
            vars(self.optimizer).update(cur_scale=scale, loss_scale=scale, overflow=overflow)

    def destroy(self) -> None:
        """End the run; see `pipemega.Engine.close`.  Collective."""
        self.pipemega_engine.close()
