"""Learning rates as functions of the number of steps taken; config.scheduler has the defaults.

An object is called with `step`, the number of steps taken, and returns the rate of the *next*
optimizer step, so `step` 0 is the rate of the first one.  Its fields are keys of the config.

The first five are DeepSpeed's.  Its WarmupLR, WarmupDecayLR and WarmupCosineLR count from -1: after
n steps their formulas use n - 1, and the first two steps have the same rate (the rates 0 and
`warmup_min_ratio` if that is set).  This is kept, so that a config gives the same curve.

Sources: DeepSpeed's lr_schedules.py; Megatron-LM's optimizer_param_scheduler.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

# DeepSpeed's OneCycle sets Adam's beta2 to this.
_CYCLE_BETA2 = 0.99


@dataclass(frozen=True, kw_only=True)
class _Warmup:
    """The warm-up of DeepSpeed's schedules, at least two steps long."""

    warmup_num_steps: int
    warmup_type: Literal["log", "linear"]

    @property
    def num_steps(self) -> int:
        return max(2, self.warmup_num_steps)

    def share(self, iteration: int) -> float:
        """Return the completed share of the warm-up; for iterations below `num_steps`."""
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.num_steps)
        return iteration / self.num_steps


@dataclass(frozen=True, kw_only=True)
class WarmupLR(_Warmup):
    """DeepSpeed's WarmupLR: rises from min to max, then stays constant."""

    warmup_min_lr: float
    warmup_max_lr: float

    def __call__(self, step: int) -> float:
        iteration = step - 1
        if iteration < 0:
            return self.warmup_min_lr
        warms_up = iteration < self.num_steps
        share = self.share(iteration) if warms_up else self.share_after(iteration)
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * share

    def share_after(self, iteration: int) -> float:
        """Return the share of max - min after the warm-up."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """DeepSpeed's WarmupDecayLR: rises from min to max, then falls linearly to min."""

    total_num_steps: int

    def share_after(self, iteration: int) -> float:
        steps = max(1.0, self.total_num_steps - self.num_steps)
        return max(0.0, (self.total_num_steps - iteration) / steps)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(_Warmup):
    """DeepSpeed's WarmupCosineLR, in ratios of the optimizer's rate; the first rate is 0."""

    base_lr: float
    total_num_steps: int
    warmup_min_ratio: float
    cos_min_ratio: float

    def __call__(self, step: int) -> float:
        iteration, low = step - 1, self.warmup_min_ratio
        if iteration < 0:
            return 0.0
        if iteration < self.num_steps:
            return self.base_lr * (low + (1 - low) * self.share(iteration))
        steps = max(1, self.total_num_steps - self.num_steps)
        progress = min(1.0, (iteration - self.num_steps + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.base_lr * max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True, kw_only=True)
class LRRangeTest:
    """DeepSpeed's LRRangeTest: rises by `step_rate` times min every `step_size` steps."""

    lr_range_test_min_lr: float
    lr_range_test_step_size: int
    lr_range_test_step_rate: float
    lr_range_test_staircase: bool

    def __call__(self, step: int) -> float:
        intervals = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """DeepSpeed's OneCycle: min to max to min, then decay by 1 / (1 + rate * intervals)."""

    cycle_min_lr: float
    cycle_max_lr: float
    cycle_min_mom: float
    cycle_max_mom: float
    decay_lr_rate: float
    decay_mom_rate: float
    cycle_first_step_size: int
    cycle_second_step_size: int
    cycle_first_stair_count: int
    cycle_second_stair_count: int
    decay_step_size: int

    def __call__(self, step: int) -> float:
        over = self._steps_over(step)
        if over <= 0:
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step)
        if self.decay_step_size == 0:
            return self.cycle_min_lr
        return self.cycle_min_lr / (1 + self.decay_lr_rate * over / self.decay_step_size)

    def betas(self, step: int) -> tuple[float, float]:
        """Adam's betas: beta1 from max to min to max; min in DeepSpeed's first step."""
        if step == 0:
            return self.cycle_min_mom, _CYCLE_BETA2
        over, size = self._steps_over(step), self.decay_step_size
        if over > 0:
            growth = self.decay_mom_rate * over / size if size else 0.0
            return self.cycle_max_mom * (1 + growth), _CYCLE_BETA2
        depth = (self.cycle_max_mom - self.cycle_min_mom) * self._height(step)
        return self.cycle_max_mom - depth, _CYCLE_BETA2

    def _steps_over(self, step: int) -> int:
        """Return the number of steps after the end of the cycle."""
        return step - (self.cycle_first_step_size + self.cycle_second_step_size)

    def _height(self, step: int) -> float:
        """Return the height within the cycle: 0 at its ends, 1 at its peak."""
        rises = step <= self.cycle_first_step_size
        at = step if rises else -self._steps_over(step)
        size = self.cycle_first_step_size if rises else self.cycle_second_step_size
        stairs = self.cycle_first_stair_count if rises else self.cycle_second_stair_count
        # Stairs from integers: the rounded height may be just below a stair.
        return math.floor(at * stairs / size) / stairs if stairs > 0 else at / size


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """Megatron-LM's schedules: linear warm-up from init to max, then the decay of `style`.

    Args:
        decay_steps: not used by "constant".
        wsd_decay_steps, wsd_decay_style: used by "WSD" only.
    """

    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    max_lr: float
    min_lr: float
    init_lr: float
    warmup_steps: int
    decay_steps: int = 0
    wsd_decay_steps: int = 0
    wsd_decay_style: str = ""

    def __call__(self, step: int) -> float:
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * step / self.warmup_steps
        if self.style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            scale = self.max_lr * math.sqrt(max(self.warmup_steps, 1))
            return max(self.min_lr, scale / math.sqrt(max(step, 1)))
        return self.min_lr + (self.max_lr - self.min_lr) * self._share(step)

    def _share(self, step: int) -> float:
        """Return the remaining share of max - min."""
        style: str = self.style
        start = self.warmup_steps
        if style == "WSD":
            style, start = self.wsd_decay_style, self.decay_steps - self.wsd_decay_steps
        ratio = max(0, step - start) / max(1, self.decay_steps - start)
        if style == "linear":
            return 1 - ratio
        if style == "cosine":
            return (math.cos(math.pi * ratio) + 1) / 2
        if style == "exponential":
            return float(2 * 0.5**ratio - 1)
        return 1 - math.sqrt(ratio)
