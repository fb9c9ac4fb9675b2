"""What a DeepSpeed engine says about its config and its optimizer."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.optim import Optimizer

from pipemega.config import Batch, Config
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError


class EngineSettings(ABC):
    """The getters of a DeepSpeed engine; `pipemega_config` and `mesh` have their values."""

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
        return self.mesh.device.index or 0

    # Batch

    def train_batch_size(self) -> int:
        """Return the samples of a step on all data ranks."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step of one data rank."""
        return self._batch.num_microbatches

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

    def gradient_clipping(self) -> float:
        return self.pipemega_config.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self.pipemega_config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.pipemega_config.wall_clock_breakdown

    # Optimizer

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; without empty first groups."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return the betas or the momentum of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ConfigError("the engine has no optimizer", on_every_rank=True)
        return self.optimizer.param_groups
