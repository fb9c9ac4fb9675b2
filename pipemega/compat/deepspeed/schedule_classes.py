"""`deepspeed.runtime.lr_schedules`: DeepSpeed's schedules as schedulers of torch."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipemega.config import load
from pipemega.optimizer.lr_schedules import FormulaSchedule, build_schedule

# Arguments of DeepSpeed's classes that are no keys of the config.
_UNUSED = ("last_batch_iteration", "verbose")


class DeepSpeedLR(LRScheduler):
    """A schedule of the config section `scheduler` over an optimizer of the user.

    Args:
        optimizer: its learning rates are set.
        type_name: `scheduler.type`.
        params: `scheduler.params`; those that are None are left out.

    Raises:
        ConfigError: as for the config.
    """

    def __init__(self, optimizer: Optimizer, type_name: str, params: dict[str, Any]) -> None:
        given = {k: v for k, v in params.items() if k not in _UNUSED and v is not None}
        scheduler = {"type": type_name, "params": given}
        # The batch size has no meaning here; a config needs one.
        section = load({"train_batch_size": 1, "scheduler": scheduler}).scheduler
        assert section is not None
        formula = build_schedule(optimizer, section)
        assert isinstance(formula, FormulaSchedule)
        self._formula = formula
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        self._formula.set_step(self.last_epoch)
        return self._formula.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self._formula.set_step(self.last_epoch)


def warmup_lr(optimizer: Optimizer, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupLR", params)


def warmup_decay_lr(optimizer: Optimizer, total_num_steps: int, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupDecayLR", {"total_num_steps": total_num_steps, **params})


def warmup_cosine_lr(optimizer: Optimizer, total_num_steps: int, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupCosineLR", {"total_num_steps": total_num_steps, **params})


def one_cycle(
    optimizer: Optimizer, cycle_min_lr: float, cycle_max_lr: float, **params: Any
) -> DeepSpeedLR:
    rates = {"cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr}
    return DeepSpeedLR(optimizer, "OneCycle", {**rates, **params})


def lr_range_test(optimizer: Optimizer, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "LRRangeTest", params)
