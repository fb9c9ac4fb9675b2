"""A scheduler of torch.optim.lr_scheduler that the user has built, as the schedule of a run."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipemega.config.scheduler import By
from pipemega.errors import CheckpointError, ConfigError
from pipemega.optimizer.lr_schedules import LRSchedule
from pipemega.optimizer.param_groups import options_of
from pipemega.optimizer.plain_values import decode_text, encode_text

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
        """Continue where the saved run was; the curve is that of the checkpoint.

        Raises:
            CheckpointError: the state is that of another class or unit, or of other groups.
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
