"""The schedule that the config names, applied to an optimizer's parameter groups."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from pipemega.config.nearest import did_you_mean
from pipemega.errors import ConfigError
from pipemega.optimizer.lr_formulas import (
    megatron,
    one_cycle,
    one_cycle_betas,
    range_test,
    warmup,
    warmup_cosine,
    warmup_decay,
)

Rate = Callable[[int], float]
Betas = Callable[[int], tuple[float, float]]

_log = logging.getLogger(__name__)


class LRSchedule:
    """Applies a schedule to an optimizer's parameter groups, from its construction on.

    Args:
        optimizer: its groups' `lr` (and `betas`) are written.
        rates: one function for all groups, or one for each.
        betas: Adam's betas, where the schedule cycles them too.
        step: steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rates: Rate | Sequence[Rate],
        *,
        betas: Betas | None = None,
        step: int = 0,
    ) -> None:
        groups = optimizer.param_groups
        self.optimizer = optimizer
        self._rates = [rates] * len(groups) if callable(rates) else list(rates)
        assert len(self._rates) == len(groups), "a rate for each parameter group"
        self._betas = betas
        self._step = step
        self._apply()

    def step(self) -> None:
        """Takes note of one optimizer step that was carried out; a skipped one is none."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The rate of the next optimizer step, for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes up at that step; the curve is this config's, not that of the checkpoint."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate(self._step)
            if self._betas is not None:
                group["betas"] = self._betas(self._step)


_DEEPSPEED: dict[str, Callable[..., float]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "OneCycle": one_cycle,
    "LRRangeTest": range_test,
}
_MEGATRON = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
SCHEDULES = (*_DEEPSPEED, *_MEGATRON)
"""The values of `scheduler.type`."""

# Filled in here, not by the user.
_GIVEN = {"step", "style", "base_lr"}
_POSITIVE = {
    "warmup_num_steps", "total_num_steps", "lr_range_test_step_size", "cycle_first_step_size",
    "cycle_second_step_size", "decay_steps",
}  # fmt: skip
_CHOICES = {
    "warmup_type": ("log", "linear"),
    "wsd_decay_style": ("exponential", "linear", "cosine", "minus_sqrt"),
}


def build_schedule(
    optimizer: Optimizer,
    type_name: str,
    params: Mapping[str, Any] | None = None,
    *,
    total_steps: int | None = None,
) -> LRSchedule:
    """The schedule that the config names, applied to `optimizer`.

    Args:
        type_name: one of `SCHEDULES`, in any case.
        params: keyword arguments of the function of that name, and `last_batch_iteration` (-1:
            from the beginning) and OneCycle's `cycle_momentum`.
        total_steps: stands in for a missing `total_num_steps` or `decay_steps`.

    Raises:
        ConfigError: an unknown type or key, or a value that makes no curve.
    """
    names = {name.lower(): name for name in SCHEDULES}
    name = names.get(type_name.lower())
    if name is None:
        raise ConfigError(
            f"unknown scheduler.type '{type_name}'{did_you_mean(type_name, SCHEDULES)}"
        )
    rest = dict(params or {})
    step = int(rest.pop("last_batch_iteration", -1)) + 1
    cycles_betas = name == "OneCycle" and rest.pop("cycle_momentum", True)
    function = _DEEPSPEED.get(name) or _of_megatron(name)
    keys = set(inspect.signature(function).parameters) - _GIVEN
    beta_keys: set[str] = set()
    if name == "OneCycle":
        beta_keys = set(inspect.signature(one_cycle_betas).parameters) - _GIVEN
    for key in rest:
        if key not in keys | beta_keys:
            hint = did_you_mean(key, keys | beta_keys)
            raise ConfigError(f"unknown key 'scheduler.params.{key}' of {name}{hint}")
    for key in ("total_num_steps", "decay_steps"):
        if key in keys and total_steps is not None:
            rest.setdefault(key, total_steps)
    _check(name, rest, function)
    own = {key: value for key, value in rest.items() if key in keys}
    rates = [_rate(name, function, own, float(g["lr"])) for g in optimizer.param_groups]
    betas = None
    if cycles_betas and "betas" in optimizer.defaults:
        betas = partial(one_cycle_betas, **{k: v for k, v in rest.items() if k in beta_keys})
    elif cycles_betas:
        _log.warning(
            "scheduler.params.cycle_momentum does nothing: the optimizer %s has no betas",
            torch.typename(optimizer),
        )
    return LRSchedule(optimizer, rates, betas=betas, step=step)


def _of_megatron(style: str) -> Callable[..., float]:
    return partial(megatron, style=style)  # type: ignore[arg-type]  # a key of SCHEDULES


def _rate(name: str, function: Callable[..., float], own: Mapping[str, Any], lr: float) -> Rate:
    """`function` as a function of the step alone; what is not given comes from the group's lr."""
    arguments = dict(own)
    if name == "WarmupCosineLR":
        arguments["base_lr"] = lr
    peak = "warmup_max_lr" if name == "WarmupLR" else "max_lr" if name in _MEGATRON else None
    if peak is not None and arguments.get(peak) is None:
        arguments[peak] = lr
    return partial(function, **arguments)


def _check(name: str, given: Mapping[str, Any], function: Callable[..., float]) -> None:
    """Refuses values that would end in a division by 0 or a curve that nobody meant."""
    where = "scheduler.params."
    for key, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is inspect.Parameter.empty and key not in _GIVEN | {"max_lr"}
        if required and key not in given:
            raise ConfigError(f"{where}{key} is missing: {name} has no default for it")
    for key, value in given.items():
        if key in _POSITIVE and value is not None and value < 1:
            raise ConfigError(f"{where}{key} is {value}: it must be at least 1")
        if key in _CHOICES and value not in _CHOICES[key]:
            options = ", ".join(map(repr, _CHOICES[key]))
            raise ConfigError(f"{where}{key} is '{value}': it must be one of {options}")
    if name in _MEGATRON and name != "constant":
        _check_megatron(name, given)


def _check_megatron(name: str, given: Mapping[str, Any]) -> None:
    up, end = given.get("warmup_steps", 0), given.get("decay_steps", 0)
    tail = given.get("wsd_decay_steps", 0)
    if end <= up:
        raise ConfigError(
            f"scheduler.params.decay_steps ({end}) must be above warmup_steps ({up}): {name} goes "
            "down between the two"
        )
    if name == "WSD" and not 0 < tail <= end - up:
        raise ConfigError(
            f"scheduler.params.wsd_decay_steps ({tail}) must be from 1 to decay_steps - "
            f"warmup_steps ({end} - {up} = {end - up}): WSD goes down in its last steps"
        )
