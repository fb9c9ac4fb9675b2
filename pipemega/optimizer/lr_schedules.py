"""Learning-rate schedules: apply the formula that the config names to parameter groups.

A scheduler of torch.optim.lr_scheduler that the user has built, as the schedule of a run.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipemega.config.sections.scheduler_section import By, RunLength, SchedulerSection
from pipemega.errors import CheckpointError, ConfigError
from pipemega.optimizer.param_groups import decode_text, encode_text, options_of

Rate = Callable[[int], float]
Betas = Callable[[int], tuple[float, float] | None]

_log = logging.getLogger(__name__)


class LRSchedule(ABC):
    """Sets the learning rates of an optimizer's parameter groups.

    Args:
        optimizer: `lr` (and other options) of its groups are set.
        by: what advances the schedule, `scheduler.by`.
    """

    def __init__(self, optimizer: Optimizer, by: By) -> None:
        self.optimizer, self.by = optimizer, by

    def step(self) -> None:
        """Refuse the call of a caller's loop: `train_batch` advances the learning rate.

        Raises:
            ConfigError: raised by every call.
        """
        raise ConfigError(
            "lr_scheduler.step() is called by train_batch(), and a second call would advance the "
            "learning rate twice per step: remove it"
        )

    def end_step(self, samples: int = 0) -> None:
        """Advance after an optimizer step that was not skipped, unless epochs advance it.

        Args:
            samples: number of samples of the step, on all data ranks.
        """
        if self.by != "epoch":
            self._advance(samples if self.by == "sample" else 1)

    def end_epoch(self) -> None:
        """Advance after a pass over the training data, if epochs advance the schedule."""
        if self.by == "epoch":
            self._advance(1)

    @abstractmethod
    def _advance(self, count: int) -> None:
        """Set the rates after `count` more steps, epochs or samples."""

    def get_last_lr(self) -> list[float]:
        """Return the rate of the next optimizer step, for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs to undo an optimizer step, whose groups are restored too."""

    @abstractmethod
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue at a `snapshot`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that saved was.

        Raises:
            CheckpointError: the state belongs to another schedule.
        """


class FormulaSchedule(LRSchedule):
    """A schedule of the config: the rate is a function of the number of steps, epochs or samples.

    The rates are set when it is constructed, too.

    Args:
        optimizer, by: the arguments of `LRSchedule`.
        rates: one function for each parameter group.
        betas: Adam's betas, if the schedule changes them too.
        step: number of steps already taken, or of epochs or samples with another `by`.
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
        super().__init__(optimizer, by)
        assert len(rates) == len(optimizer.param_groups), "a rate for each parameter group"
        self._rates, self._betas, self._step = rates, betas, step
        self._apply()

    def _advance(self, count: int) -> None:
        self.set_step(self._step + count)

    def set_step(self, step: int) -> None:
        """Set the rates after `step` steps, or epochs or samples with another `by`."""
        self._step = step
        self._apply()

    def snapshot(self) -> dict[str, Any]:
        return self.state_dict()

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.load_state_dict(snapshot)

    def state_dict(self) -> dict[str, int]:
        return {self.by: self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the saved run was, on the curve of this config.

        Raises:
            CheckpointError: the saved run counted another unit, or had a scheduler of its own.
        """
        if "class" in state:
            raise CheckpointError(
                f"the checkpoint has the state of the learning-rate schedule {state['class']}, "
                "which initialize() got, and this run uses the config section 'scheduler': give "
                "initialize() the same lr_scheduler, or load without the schedule "
                "(checkpoint.load_lr_scheduler_states false)"
            )
        if self.by not in state:
            raise CheckpointError(
                f"the schedule of the checkpoint counts {'/'.join(state)}s, and scheduler.by is "
                f"{self.by!r}: restore scheduler.by, or load without the schedule "
                "(checkpoint.load_lr_scheduler_states false)"
            )
        self._step = int(state[self.by])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self._step)
            if self._betas is not None:
                group["betas"] = self._betas(self._step)


_LENGTH_UNKNOWN = (
    "its default, the length of the run, is not known: training_data has no length, or "
    'initialize() did not get it. Set the key, or scheduler.by "epoch" and training.epochs'
)

_UNKNOWN_LENGTH = RunLength()

# Epochs whose rates are compared with 0: DeepSpeed's warm-ups begin with two equal rates.
_MOST_IDLE_EPOCHS = 3


def build_schedule(
    optimizer: Optimizer,
    section: SchedulerSection,
    length: RunLength = _UNKNOWN_LENGTH,
) -> LRSchedule:
    """Build the schedule that the config names, and apply it to `optimizer`.

    Args:
        section: the section `scheduler`, with a type; the config has validated it.
        length: the length of the run, if known: the default of `total_num_steps` and
            `decay_steps`, in the unit of `scheduler.by`.

    Raises:
        ConfigError: the parameters do not fit this length, or it is needed and not known; a group
            has a learning rate, and the optimizer has 0.
    """
    try:
        section.check(length, _LENGTH_UNKNOWN)
    except ValueError as error:
        raise ConfigError(str(error), on_every_rank=True) from error
    assert section.params is not None, "a type has parameters"
    params = section.params.with_length(length.in_unit(section.by), section.by)
    lr = float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))
    rate = partial(params.rate, lr=lr)
    rates = [_scaled(rate, float(group["lr"]), lr) for group in optimizer.param_groups]
    betas = None
    if params.betas(0) is not None and "betas" in optimizer.defaults:
        betas = params.betas
    elif params.betas(0) is not None:
        _log.warning(
            "scheduler.params.cycle_momentum has no effect: the optimizer %s has no betas",
            torch.typename(optimizer),
        )
    first_step = getattr(params, "last_batch_iteration", -1) + 1
    idle = next((n for n in range(_MOST_IDLE_EPOCHS) if any(r(n) for r in rates)), 0)
    if section.by == "epoch" and idle:
        _log.warning(
            "scheduler.by is 'epoch', and %s has the learning rate 0, so it trains nothing: set "
            "the first rate of the warm-up above 0 (scheduler.params.warmup_init_lr of Megatron's "
            "types, warmup_min_lr of WarmupLR and WarmupDecayLR), or scheduler.by to 'step'",
            "the first epoch" if idle == 1 else f"each of the first {idle} epochs",
        )
    return FormulaSchedule(optimizer, rates, betas=betas, step=first_step, by=section.by)


def _scaled(rate: Rate, group_lr: float, lr: float) -> Rate:
    """Return the rate of a group, which keeps its ratio to the rate of the optimizer."""
    if group_lr == lr:
        return rate
    if lr == 0:
        raise ConfigError(
            f"a parameter group has the learning rate {group_lr:g}, and the optimizer's is 0, so "
            "the schedule has no ratio to keep: set optimizer.params.lr",
            on_every_rank=True,
        )
    return lambda step: rate(step) * group_lr / lr


SchedulerMaker = Callable[[Optimizer], Any]
"""Optimizer -> torch scheduler, or another object with its methods."""

_METHODS = ("step", "state_dict", "load_state_dict")


class TorchSchedule(LRSchedule):
    """Advances a torch scheduler.

    Args:
        optimizer: the optimizer of the run.
        make: builds the scheduler; `initialize(lr_scheduler=...)`.
        by: what advances it, `scheduler.by`.

    Attributes:
        scheduler: what `make` has returned.

    Raises:
        ConfigError: `make` fails, or does not return a scheduler over `optimizer` that can be
            saved.
    """

    def __init__(self, optimizer: Optimizer, make: SchedulerMaker, by: By) -> None:
        super().__init__(optimizer, by)
        self._before = [options_of(group) for group in optimizer.param_groups]
        try:
            scheduler = make(optimizer)
        except Exception as error:
            raise ConfigError(f"lr_scheduler raised {type(error).__name__}: {error}") from error
        _check(scheduler, optimizer)
        self.scheduler: Any = scheduler
        try:
            self.state_dict()
        except ValueError as error:
            raise ConfigError(
                f"the state of the scheduler {self._name} cannot be saved in a checkpoint: {error}"
            ) from error

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def _advance(self, count: int) -> None:
        self.scheduler.step()

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.scheduler.state_dict())

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Return its state, and the options of the optimizer that it has changed."""
        state = {"scheduler": self.scheduler.state_dict(), "options": self._changed_options()}
        return {"class": self._name, "by": self.by, "state": encode_text(state)}

    def _changed_options(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in options_of(group).items() if k == "lr" or before.get(k) != v}
            for before, group in zip(self._before, self.optimizer.param_groups, strict=True)
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the saved run was, on the curve of the checkpoint.

        Raises:
            CheckpointError: the state belongs to another class or unit, or to other groups.
        """
        here = {"class": self._name, "by": self.by}
        saved = {key: state.get(key) for key in here}
        if saved != here:
            raise CheckpointError(
                f"the checkpoint has the state of the learning-rate schedule {_text(saved)}, and "
                f"this run has {_text(here)}: restore it, or load without the schedule "
                "(checkpoint.load_lr_scheduler_states false)"
            )
        loaded, groups = decode_text(state["state"]), self.optimizer.param_groups
        if len(loaded["options"]) != len(groups):
            raise CheckpointError(
                f"the schedule of the checkpoint has {len(loaded['options'])} parameter groups, "
                f"and the optimizer has {len(groups)}: restore the groups, or load without the "
                "schedule (checkpoint.load_lr_scheduler_states false)"
            )
        self.scheduler.load_state_dict(loaded["scheduler"])
        for group, options in zip(groups, loaded["options"], strict=True):
            group.update(options)


def _check(scheduler: Any, optimizer: Optimizer) -> None:
    name = type(scheduler).__name__
    problem = None
    if isinstance(scheduler, ReduceLROnPlateau):
        problem = (
            "lr_scheduler returns a ReduceLROnPlateau, which needs a metric in each call of "
            "step(), and train_batch() calls it without one: change engine.optimizer's learning "
            "rate in a callback after each evaluation, or use another scheduler"
        )
    elif not all(callable(getattr(scheduler, name, None)) for name in _METHODS):
        problem = (
            f"lr_scheduler must return a scheduler of torch.optim.lr_scheduler, or an object with "
            f"its methods {', '.join(_METHODS)}, and it returns {scheduler!r}: write "
            f"lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 100)"
        )
    elif getattr(scheduler, "optimizer", optimizer) is not optimizer:
        problem = (
            f"lr_scheduler returns a {name} over another optimizer "
            f"({type(scheduler.optimizer).__name__}) than the engine's "
            f"({type(optimizer).__name__}), so it would change no learning rate of this run: build "
            "it over the argument of the function"
        )
    if problem is not None:
        raise ConfigError(problem)


def _text(saved: Mapping[str, Any]) -> str:
    name = saved["class"] or "of the config section 'scheduler'"
    return f"{name} by {saved['by']}" if saved["by"] else name
