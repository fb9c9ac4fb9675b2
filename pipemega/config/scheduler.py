"""`scheduler`: the learning rate over the steps.  Floor 1.

DeepSpeed's five types with its keys and defaults, and Megatron's five with steps in place of
samples.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import SerializeAsAny, model_validator

from pipemega.config.keys import (
    Count,
    NotNegative,
    Section,
    SectionClass,
    Share,
    Whole,
    honoured,
    ignored,
    own,
)
from pipemega.config.optimizer import with_type

Warmup = Literal["log", "linear"]
_TOTAL = "Steps of the whole run; null: `training.train_steps`."


class SchedulerParams(Section):
    """What every schedule takes."""

    def arguments(self, train_steps: int | None) -> dict[str, Any]:
        """What was given or follows from it, for the function of that schedule."""
        return {name: value for name, value in self if value is not None}

    def check(self, train_steps: int | None) -> None:
        """Raises ValueError where the run's length does not go with these."""


class DeepSpeedParams(SchedulerParams):
    last_batch_iteration: int = honoured(-1, "The step to begin after; -1: at the start.", ge=-1)


class WarmupLRParams(DeepSpeedParams):
    """Up from min to max, then constant."""

    warmup_min_lr: NotNegative = honoured(0.0, "Rate of the first step.")
    warmup_max_lr: NotNegative | None = honoured(
        None, "Rate after the warm-up; null: that of the optimizer."
    )
    warmup_num_steps: Count = honoured(1000, "Length of the warm-up.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class _WithTotal(DeepSpeedParams):
    total_num_steps: Count | None = honoured(None, _TOTAL)

    def arguments(self, train_steps: int | None) -> dict[str, Any]:
        total = self.total_num_steps or train_steps
        return {**super().arguments(train_steps), "total_num_steps": total}

    def check(self, train_steps: int | None) -> None:
        if self.total_num_steps is None and train_steps is None:
            raise ValueError(
                "scheduler.params.total_num_steps is missing, and so is training.train_steps, "
                "which would stand in: give one of them"
            )


class WarmupDecayLRParams(_WithTotal):
    """Up from min to max, then down in a line."""

    warmup_min_lr: NotNegative = honoured(0.0, "Rate of the first step, and of the last.")
    warmup_max_lr: NotNegative = honoured(0.001, "Rate after the warm-up.")
    warmup_num_steps: Count = honoured(1000, "Length of the warm-up.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class WarmupCosineLRParams(_WithTotal):
    """Up, then down along a cosine; in parts of the optimizer's rate."""

    warmup_min_ratio: Share = honoured(0.0, "Where the warm-up begins.")
    warmup_num_steps: Count = honoured(1000, "Length of the warm-up.")
    cos_min_ratio: Share = honoured(1e-4, "Where the cosine ends.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class OneCycleParams(DeepSpeedParams):
    """Up, down, and then slowly further down."""

    cycle_min_lr: NotNegative = honoured(..., "Rate at the ends of the cycle.")
    cycle_max_lr: NotNegative = honoured(..., "Rate at its peak.")
    decay_lr_rate: NotNegative = honoured(0.0, "Decay of the rate after the cycle.")
    cycle_first_step_size: Count = honoured(2000, "Steps up.")
    cycle_second_step_size: Count | None = honoured(None, "Steps down; null: as many as up.")
    cycle_first_stair_count: Whole = honoured(0, "Stairs up; 0: a line.")
    cycle_second_stair_count: Whole | None = honoured(None, "Stairs down; null: as up.")
    decay_step_size: Whole = honoured(0, "Steps per decay after the cycle; 0: no decay.")
    cycle_momentum: bool = honoured(True, "Adam's first beta goes the other way.")
    cycle_min_mom: NotNegative = honoured(0.8, "Its value at the peak.", lt=1)
    cycle_max_mom: NotNegative = honoured(0.9, "Its value at the ends.", lt=1)
    decay_mom_rate: NotNegative = honoured(0.0, "Its decay after the cycle.")


class LRRangeTestParams(DeepSpeedParams):
    """Up without end, to see where training breaks."""

    lr_range_test_min_lr: NotNegative = honoured(1e-3, "Where it begins.")
    lr_range_test_step_size: Count = honoured(2000, "Steps per rise.")
    lr_range_test_step_rate: NotNegative = honoured(1.0, "Size of a rise, in parts of the begin.")
    lr_range_test_staircase: bool = honoured(False, "Rise in stairs.")


class ConstantParams(SchedulerParams):
    """Megatron's schedules: up in a line from `warmup_init_lr`, then what the type says."""

    max_lr: NotNegative | None = own(None, "Rate after the warm-up; null: that of the optimizer.")
    warmup_init_lr: NotNegative = own(0.0, "Rate before the first step of the warm-up.")
    warmup_steps: Whole = own(0, "Length of the warm-up.")
    warmup_fraction: Share | None = own(None, "The same, as a share of `decay_steps`.")
    decay_steps: Count | None = own(None, "Where the way down ends; null: `training.train_steps`.")
    min_lr: NotNegative = ignored(
        0.0, "Smallest rate.", "a constant rate does not fall", agrees=[0, 0.0]
    )

    @model_validator(mode="after")
    def _one_length_of_warmup(self) -> "ConstantParams":
        if self.warmup_fraction is not None and self.warmup_steps:
            raise ValueError(
                "scheduler.params.warmup_steps and scheduler.params.warmup_fraction are both "
                "given: keep one"
            )
        return self

    def arguments(self, train_steps: int | None) -> dict[str, Any]:
        named = {
            "max_lr": self.max_lr,
            "min_lr": self.min_lr,
            "init_lr": self.warmup_init_lr,
            "warmup_steps": self._warmup(train_steps),
            "decay_steps": self.decay_steps or train_steps,
        }
        return {name: value for name, value in named.items() if value is not None}

    def check(self, train_steps: int | None) -> None:
        if self.warmup_fraction is not None and not (self.decay_steps or train_steps):
            raise ValueError(
                "scheduler.params.warmup_fraction is a share of scheduler.params.decay_steps, "
                "which is missing, as is training.train_steps: give one of them"
            )

    def _warmup(self, train_steps: int | None) -> int:
        if self.warmup_fraction is None:
            return self.warmup_steps
        return round(self.warmup_fraction * (self.decay_steps or train_steps or 0))


class FallingParams(ConstantParams):
    """Down from `max_lr` to `min_lr`, which is reached at `decay_steps`."""

    min_lr: NotNegative = own(0.0, "Rate at `decay_steps` and after.")

    def check(self, train_steps: int | None) -> None:
        super().check(train_steps)
        end, warmup = self.decay_steps or train_steps, self._warmup(train_steps)
        if end is None:
            raise ValueError(
                "scheduler.params.decay_steps is missing, and so is training.train_steps, which "
                "would stand in: give one of them"
            )
        if end <= warmup:
            raise ValueError(
                f"scheduler.params.decay_steps ({end}) must be above the warm-up's {warmup} steps: "
                "the rate falls between the two"
            )


class WsdParams(FallingParams):
    """Constant after the warm-up, and down in the last `wsd_decay_steps`."""

    wsd_decay_steps: Count = own(..., "Steps of the way down at the end.")
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = own(
        "exponential", "Its shape."
    )

    def arguments(self, train_steps: int | None) -> dict[str, Any]:
        tail = {"wsd_decay_steps": self.wsd_decay_steps, "wsd_decay_style": self.wsd_decay_style}
        return super().arguments(train_steps) | tail

    def check(self, train_steps: int | None) -> None:
        super().check(train_steps)
        falling = (self.decay_steps or train_steps or 0) - self._warmup(train_steps)
        if self.wsd_decay_steps > falling:
            raise ValueError(
                f"scheduler.params.wsd_decay_steps ({self.wsd_decay_steps}) must be at most "
                f"decay_steps less the warm-up ({falling}): the rate falls in the last steps"
            )


PARAMS: Mapping[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "constant": ConstantParams,
    "linear": FallingParams,
    "cosine": FallingParams,
    "inverse-square-root": FallingParams,
    "WSD": WsdParams,
}


class SchedulerSection(Section):
    """The learning rate; without it, it is the optimizer's at every step."""

    type: Literal[
        "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest",
        "constant", "linear", "cosine", "inverse-square-root", "WSD",
    ] = honoured(..., "Which one, in any case of letters.")  # fmt: skip
    params: SerializeAsAny[SchedulerParams] = honoured(..., "What that type takes; see below.")

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return with_type(raw, "scheduler.type", PARAMS)

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return PARAMS[raw["type"]] if key == "params" else super().section_at(key, raw)
