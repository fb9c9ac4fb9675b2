"""Schedulers of the caller: torch's, and others that have a method `step`."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipemega.optimizer.lr_schedules import LRSchedule, SchedulerMaker, TorchSchedule


class _IncrementedSchedule:
    """A scheduler whose `step` takes the number of samples, as Megatron's do.

    Args:
        scheduler: of the caller.
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


def given_schedule(schedule: LRSchedule | None) -> Any:
    """Return the scheduler of the caller in the schedule of an engine; else the schedule."""
    if not isinstance(schedule, TorchSchedule):
        return schedule
    found = schedule.scheduler
    return found.scheduler if isinstance(found, _IncrementedSchedule) else found


def _needs_argument(step: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    return any(p.kind in kinds and p.default is p.empty for p in parameters)
