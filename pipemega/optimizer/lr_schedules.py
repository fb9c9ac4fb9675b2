"""Learning-rate schedules: apply the formula that the config names to parameter groups."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from pipemega.config.scheduler import By, SchedulerSection
from pipemega.errors import CheckpointError, ConfigError
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
        step: number of steps already taken; of epochs with `by: "epoch"`.
        by: what advances the schedule, `scheduler.by`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rates: Sequence[Rate],
        *,
        betas: Betas | None = None,
        step: int = 0,
        by: By = "step",
    ) -> None:
        assert len(rates) == len(optimizer.param_groups), "a rate for each parameter group"
        self.optimizer, self._by = optimizer, by
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

    def end_step(self) -> None:
        """Advance after an optimizer step that was not skipped, unless epochs advance it."""
        if self._by == "step":
            self._advance()

    def end_epoch(self) -> None:
        """Advance after a pass over the training data, if epochs advance the schedule."""
        if self._by == "epoch":
            self._advance()

    def _advance(self) -> None:
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the rate of the next optimizer step, for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {self._by: self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where the saved run was; the curve is that of this config.

        Raises:
            CheckpointError: the saved run counted another unit.
        """
        if self._by not in state:
            raise CheckpointError(
                f"the schedule of the checkpoint counts {'/'.join(state)}s, and scheduler.by is "
                f"{self._by!r}: restore scheduler.by, or load without the schedule "
                "(checkpoint.load_lr_scheduler_states false)"
            )
        self._step = int(state[self._by])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self._step)
            if self._betas is not None:
                group["betas"] = self._betas(self._step)


_DEEPSPEED = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
"""DeepSpeed's types, named as in the config; Megatron's types are styles of one formula."""

_LENGTH_UNKNOWN = (
    "its default, the length of the run, is not known: training_data has no length, or "
    'initialize() did not get it. Set the key, or scheduler.by "epoch" and training.epochs'
)

# Arguments that default to the learning rate of the parameter group.
_DEFAULT_TO_GROUP_LR = {"base_lr", "warmup_max_lr", "max_lr"}


def build_schedule(
    optimizer: Optimizer,
    section: SchedulerSection,
    total_steps: int | None = None,
    total_epochs: int | None = None,
) -> LRSchedule:
    """Build the schedule that the config names, and apply it to `optimizer`.

    Args:
        section: with a type; `config.scheduler` has validated it.
        total_steps, total_epochs: the length of the run, if known: the default of
            `total_num_steps` and `decay_steps`, in the unit of `scheduler.by`.

    Raises:
        ConfigError: the parameters do not fit this length, or it is needed and not known.
    """
    name = section.type
    formulas: dict[str, Callable[..., Rate]] = {kind.__name__: kind for kind in _DEEPSPEED}
    formula = formulas.get(name or "") or partial(Megatron, style=name)  # type: ignore[arg-type]
    keys = inspect.signature(formula).parameters.keys() - {"style"}
    try:
        section.check(total_steps, total_epochs, _LENGTH_UNKNOWN)
    except ValueError as error:
        raise ConfigError(str(error), on_every_rank=True) from error
    given = section.arguments(total_steps, total_epochs)
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
    first_step = given.get("last_batch_iteration", -1) + 1
    return LRSchedule(optimizer, rates, betas=betas, step=first_step, by=section.by)
