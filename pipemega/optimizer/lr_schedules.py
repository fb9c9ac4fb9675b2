"""Learning-rate schedules: apply the formula that the config names to parameter groups."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from pipemega.config.scheduler import SchedulerParams
from pipemega.errors import ConfigError
from pipemega.optimizer.lr_formulas import (
    LRRangeTest,
    Megatron,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

Rate = Callable[[int], float]
Betas = Callable[[int], tuple[float, float]]

_log = logging.getLogger(__name__)


class LRSchedule:
    """Sets the learning rates of an optimizer's parameter groups, the first time when constructed.

    Args:
        optimizer: `lr` (and `betas`) of its groups are set.
        rates: one function for each group.
        betas: Adam's betas, if the schedule changes them too.
        step: number of steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rates: Sequence[Rate],
        *,
        betas: Betas | None = None,
        step: int = 0,
    ) -> None:
        assert len(rates) == len(optimizer.param_groups), "a rate for each parameter group"
        self.optimizer = optimizer
        self._rates, self._betas, self._step = rates, betas, step
        self._apply()

    def step(self) -> None:
        """Refuse the call of a caller's loop: `train_batch` advances the learning rate.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "lr_scheduler.step() is called by train_batch(), and a second call would advance the "
            "learning rate twice per step: remove it"
        )

    def advance(self) -> None:
        """Advance after an optimizer step; not called for skipped steps."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the rate of the next optimizer step, for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the saved step; the curve is that of this config, not of the checkpoint."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self._step)
            if self._betas is not None:
                group["betas"] = self._betas(self._step)


_DEEPSPEED = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
"""DeepSpeed's types, named as in the config; Megatron's types are styles of one formula."""

# Arguments that default to the learning rate of the parameter group.
_DEFAULT_TO_GROUP_LR = {"base_lr", "warmup_max_lr", "max_lr"}


def build_schedule(
    optimizer: Optimizer, type_name: str, params: SchedulerParams, train_steps: int | None = None
) -> LRSchedule:
    """Build the schedule that the config names, and apply it to `optimizer`.

    Args:
        type_name, params: `scheduler.type` and `.params`, which `config.scheduler` has validated.
        train_steps: the length of the run: default of `total_num_steps` and `decay_steps`.
    """
    formulas: dict[str, Callable[..., Rate]] = {kind.__name__: kind for kind in _DEEPSPEED}
    formula = formulas.get(type_name) or partial(Megatron, style=type_name)  # type: ignore[arg-type]
    keys = inspect.signature(formula).parameters.keys() - {"style"}
    given = params.arguments(train_steps)
    arguments = {key: value for key, value in given.items() if key in keys}
    rates = []
    for group in optimizer.param_groups:
        defaults = dict.fromkeys(_DEFAULT_TO_GROUP_LR & keys, float(group["lr"]))
        rates.append(formula(**defaults | arguments))
    betas, first = None, rates[0]
    if isinstance(first, OneCycle) and given["cycle_momentum"]:
        betas = first.betas if "betas" in optimizer.defaults else None
    if betas is None and given.get("cycle_momentum"):
        _log.warning(
            "scheduler.params.cycle_momentum has no effect: the optimizer %s has no betas",
            torch.typename(optimizer),
        )
    return LRSchedule(optimizer, rates, betas=betas, step=given.get("last_batch_iteration", -1) + 1)
