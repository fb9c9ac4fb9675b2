"""Learning rates as functions of the number of steps taken.

Each function below gives the rate for the *next* optimizer step when `step` steps have been taken,
so that `step` 0 is the rate of the first one.

The first five are DeepSpeed's.  DeepSpeed counts from -1: after n steps its formulas see n - 1,
and its first two steps have the same rate.  That is kept, so that a config gives the same curve.

Sources: DeepSpeed's lr_schedules.py; Megatron-LM's optimizer_param_scheduler.py.
"""

import math
from typing import Literal

# OneCycle leaves Adam no second moment of its own: DeepSpeed sets it to this.
_CYCLE_BETA2 = 0.99


def _warmup_share(iteration: int, num_steps: int, warmup_type: str) -> float:
    """How much of the way up is done; may exceed 1 after the last step."""
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


def warmup(
    step: int,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: Literal["log", "linear"] = "log",
) -> float:
    """DeepSpeed's WarmupLR: up from min to max, then constant."""
    iteration, num_steps = step - 1, max(2, warmup_num_steps)
    if iteration < 0:
        return warmup_min_lr
    share = _warmup_share(iteration, num_steps, warmup_type) if iteration < num_steps else 1.0
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def warmup_decay(
    step: int,
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: Literal["log", "linear"] = "log",
) -> float:
    """DeepSpeed's WarmupDecayLR: up from min to max, then in a line down to min."""
    iteration, num_steps = step - 1, max(2, warmup_num_steps)
    if iteration < 0:
        return warmup_min_lr
    if iteration < num_steps:
        share = _warmup_share(iteration, num_steps, warmup_type)
    else:
        share = max(0.0, (total_num_steps - iteration) / max(1.0, total_num_steps - num_steps))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def warmup_cosine(
    step: int,
    *,
    base_lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: Literal["log", "linear"] = "log",
) -> float:
    """DeepSpeed's WarmupCosineLR: ratios of the optimizer's rate; the very first rate is 0."""
    iteration, num_steps = step - 1, max(2, warmup_num_steps)
    if iteration < 0:
        return 0.0
    if iteration < num_steps:
        share = _warmup_share(iteration, num_steps, warmup_type)
        return base_lr * (warmup_min_ratio + (1 - warmup_min_ratio) * share)
    progress = min(1.0, (iteration - num_steps + 1) / max(1, total_num_steps - num_steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return base_lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * cosine)


def range_test(
    step: int,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> float:
    """DeepSpeed's LRRangeTest: up without end, by `step_rate` times min each `step_size` steps."""
    intervals = step / lr_range_test_step_size
    if lr_range_test_staircase:
        intervals = math.floor(intervals)
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals)


def _second_size(first: int, second: int | None) -> int:
    return first if second is None else second


def _cycle_height(
    step: int, first_size: float, second_size: float, first_stairs: int, second_stairs: int
) -> float:
    """0 at the ends of a cycle, 1 at its peak."""
    total = first_size + second_size
    at = step - total * math.floor(step / total)
    rising = at <= first_size
    height = at / first_size if rising else (total - at) / second_size
    stairs = first_stairs if rising else second_stairs
    if stairs <= 0:
        return height
    # From whole numbers of steps: a height that rounding puts just below a stair would lose it.
    position = at * stairs / first_size if rising else (total - at) * stairs / second_size
    return math.floor(position) / stairs


def one_cycle(
    step: int,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> float:
    """DeepSpeed's OneCycle: min to max to min, then down by 1 / (1 + rate * intervals)."""
    second_size = _second_size(cycle_first_step_size, cycle_second_step_size)
    over = step - (cycle_first_step_size + second_size)
    if over <= 0:
        second_stairs = cycle_second_stair_count
        height = _cycle_height(
            step,
            cycle_first_step_size,
            second_size,
            cycle_first_stair_count,
            cycle_first_stair_count if second_stairs is None else second_stairs,
        )
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height
    if decay_step_size == 0:
        return cycle_min_lr
    return cycle_min_lr / (1 + decay_lr_rate * over / decay_step_size)


def one_cycle_betas(
    step: int,
    *,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> tuple[float, float]:
    """The momentum of OneCycle: max to min to max; DeepSpeed's first step has min."""
    if step == 0:
        return cycle_min_mom, _CYCLE_BETA2
    second_size = _second_size(cycle_first_step_size, cycle_second_step_size)
    over = step - (cycle_first_step_size + second_size)
    if over > 0:
        growth = decay_mom_rate * over / decay_step_size if decay_step_size else 0.0
        return cycle_max_mom * (1 + growth), _CYCLE_BETA2
    second_stairs = cycle_second_stair_count
    height = _cycle_height(
        step,
        cycle_first_step_size,
        second_size,
        cycle_first_stair_count,
        cycle_first_stair_count if second_stairs is None else second_stairs,
    )
    return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height, _CYCLE_BETA2


def megatron(
    step: int,
    *,
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    max_lr: float,
    min_lr: float = 0.0,
    init_lr: float = 0.0,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    wsd_decay_steps: int = 0,
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential",
) -> float:
    """Megatron-LM's schedules, in steps: a line up from init to max, then the style's way down."""
    if warmup_steps > 0 and step <= warmup_steps:
        return init_lr + (max_lr - init_lr) * step / warmup_steps
    if style == "constant":
        return max_lr
    if step > decay_steps:
        return min_lr
    if style == "inverse-square-root":
        return max(min_lr, max_lr * math.sqrt(max(warmup_steps, 1)) / math.sqrt(max(step, 1)))
    if style == "WSD":
        return min_lr + (max_lr - min_lr) * _tail(
            step - (decay_steps - wsd_decay_steps), wsd_decay_steps, wsd_decay_style
        )
    ratio = (step - warmup_steps) / max(1, decay_steps - warmup_steps)
    share = 1 - ratio if style == "linear" else (math.cos(math.pi * ratio) + 1) / 2
    return min_lr + (max_lr - min_lr) * share


def _tail(steps_in: int, steps: int, style: str) -> float:
    """The share of max - min that WSD has left, `steps_in` steps into its last part."""
    if steps_in <= 0:
        return 1.0
    ratio = steps_in / steps
    if style == "linear":
        return 1 - ratio
    if style == "cosine":
        return (math.cos(math.pi * ratio) + 1) / 2
    if style == "exponential":
        return float(2 * 0.5**ratio - 1)
    return 1 - math.sqrt(ratio)
