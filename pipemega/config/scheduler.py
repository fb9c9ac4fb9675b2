"""The config section `scheduler`: the learning rate over the steps, or over the epochs.

DeepSpeed's five types with its keys and defaults, and Megatron's five, in steps instead of samples.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import SerializeAsAny

from pipemega.config.key_kinds import Section, SectionClass, honoured, ignored, own, rule
from pipemega.config.optimizer import normalize_type
from pipemega.config.value_types import Count, NotNegative, Share, Whole

Warmup = Literal["log", "linear"]
By = Literal["step", "epoch"]
_TOTAL = "Length of the whole run; null: that of the section `training`."
_SET_ONE = {
    "step": "so is training.train_steps, its default: set one of them",
    "epoch": "so is training.epochs, its default: set one of them",
}


class SchedulerParams(Section):
    """Keys of every schedule; lengths are in steps, or with `scheduler.by: "epoch"` in epochs."""

    def arguments(self, total: int | None) -> dict[str, Any]:
        """Return the arguments of the formula in optimizer/lr_formulas.py, without null ones.

        Args:
            total: length of the run, the default of other lengths.
        """
        return {name: value for name, value in self if value is not None}

    def check(self, total: int | None, advice: str) -> None:
        """Raise ValueError if these parameters do not fit the length of the run.

        Args:
            advice: the end of the message if the length is needed, and None.
        """


class DeepSpeedParams(SchedulerParams):
    last_batch_iteration: int = honoured(-1, "Start after this step; -1: at the first step.", ge=-1)


class WarmupLRParams(DeepSpeedParams):
    """Rises from min to max, then stays constant."""

    warmup_min_lr: NotNegative = honoured(0.0, "Rate of the first step.")
    warmup_max_lr: NotNegative | None = honoured(
        None, "Rate after the warm-up; null: that of the optimizer."
    )
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; below 2: 2.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class _WithTotal(DeepSpeedParams):
    total_num_steps: Count | None = honoured(None, _TOTAL)

    def arguments(self, total: int | None) -> dict[str, Any]:
        return {**super().arguments(total), "total_num_steps": self.total_num_steps or total}

    def check(self, total: int | None, advice: str) -> None:
        if self.total_num_steps is None and total is None:
            raise ValueError(f"scheduler.params.total_num_steps is missing, and {advice}")


class WarmupDecayLRParams(_WithTotal):
    """Rises from min to max, then falls linearly."""

    warmup_min_lr: NotNegative = honoured(0.0, "Rate of the first step, and of the last.")
    warmup_max_lr: NotNegative = honoured(0.001, "Rate after the warm-up.")
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; below 2: 2.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class WarmupCosineLRParams(_WithTotal):
    """Rises, then falls along a cosine; in ratios of the optimizer's rate."""

    warmup_min_ratio: Share = honoured(
        0.0, "Rate at the start of the warm-up, relative to that of the optimizer."
    )
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; below 2: 2.")
    cos_min_ratio: Share = honoured(
        1e-4, "Rate at the end of the cosine, relative to that of the optimizer."
    )
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")


class OneCycleParams(DeepSpeedParams):
    """One cycle up and down, then a slow decay."""

    cycle_min_lr: NotNegative = honoured(..., "Rate at both ends of the cycle.")
    cycle_max_lr: NotNegative = honoured(..., "Rate at the peak.")
    decay_lr_rate: NotNegative = honoured(0.0, "Decay of the rate after the cycle.")
    cycle_first_step_size: Count = honoured(2000, "Steps of the rise.")
    cycle_second_step_size: Count | None = honoured(
        None, "Steps of the fall; null: `cycle_first_step_size`."
    )
    cycle_first_stair_count: Whole = honoured(0, "Number of stairs in the rise; 0: linear.")
    cycle_second_stair_count: Whole | None = honoured(
        None, "Number of stairs in the fall; null: `cycle_first_stair_count`."
    )
    decay_step_size: Whole = honoured(0, "Steps per decay after the cycle; 0: no decay.")
    cycle_momentum: bool = honoured(True, "Cycle Adam's beta1 in the opposite direction.")
    cycle_min_mom: NotNegative = honoured(0.8, "beta1 at the peak.", lt=1)
    cycle_max_mom: NotNegative = honoured(0.9, "beta1 at both ends.", lt=1)
    decay_mom_rate: NotNegative = honoured(0.0, "Growth of beta1 after the cycle.")

    def arguments(self, total: int | None) -> dict[str, Any]:
        steps, stairs = self.cycle_second_step_size, self.cycle_second_stair_count
        return super().arguments(total) | {
            "cycle_second_step_size": self.cycle_first_step_size if steps is None else steps,
            "cycle_second_stair_count": self.cycle_first_stair_count if stairs is None else stairs,
        }


class LRRangeTestParams(DeepSpeedParams):
    """Rises without limit, to find the rate at which training diverges."""

    lr_range_test_min_lr: NotNegative = honoured(1e-3, "Rate of the first step.")
    lr_range_test_step_size: Count = honoured(2000, "Steps per rise.")
    lr_range_test_step_rate: NotNegative = honoured(
        1.0, "Size of a rise, as a multiple of the first rate."
    )
    lr_range_test_staircase: bool = honoured(False, "Rise in stairs.")


class ConstantParams(SchedulerParams):
    """Megatron's schedules: linear warm-up from `warmup_init_lr`, then constant."""

    max_lr: NotNegative | None = own(None, "Rate after the warm-up; null: that of the optimizer.")
    warmup_init_lr: NotNegative = own(0.0, "Rate before the first step of the warm-up.")
    warmup_steps: Whole = own(0, "Length of the warm-up.")
    warmup_fraction: Share | None = own(None, "Length of the warm-up as a share of `decay_steps`.")
    decay_steps: Count | None = own(None, "Length of the schedule; null: that of the run.")
    min_lr: NotNegative = ignored(
        0.0, "Smallest rate.", "a constant rate does not decay", agrees=[0, 0.0]
    )

    @rule("warmup_fraction", "warmup_steps")
    def _one_length_of_warmup(self) -> Iterator[str]:
        if self.warmup_fraction is not None and self.warmup_steps:
            yield (
                "scheduler.params.warmup_steps and scheduler.params.warmup_fraction are both "
                "given: keep one"
            )

    def arguments(self, total: int | None) -> dict[str, Any]:
        named = {
            "max_lr": self.max_lr,
            "min_lr": self.min_lr,
            "init_lr": self.warmup_init_lr,
            "warmup_steps": self._warmup(total),
            "decay_steps": self.decay_steps or total,
        }
        return {name: value for name, value in named.items() if value is not None}

    def check(self, total: int | None, advice: str) -> None:
        if self.warmup_fraction is not None and not (self.decay_steps or total):
            raise ValueError(
                "scheduler.params.warmup_fraction is a share of scheduler.params.decay_steps, "
                f"which is missing, and {advice}"
            )

    def _warmup(self, total: int | None) -> int:
        if self.warmup_fraction is None:
            return self.warmup_steps
        return round(self.warmup_fraction * (self.decay_steps or total or 0))


class DecayParams(ConstantParams):
    """Decays from `max_lr` to `min_lr`, which is reached at `decay_steps`."""

    min_lr: NotNegative = own(0.0, "Rate from `decay_steps` on.")

    def check(self, total: int | None, advice: str) -> None:
        super().check(total, advice)
        end, warmup = self.decay_steps or total, self._warmup(total)
        if end is None:
            raise ValueError(f"scheduler.params.decay_steps is missing, and {advice}")
        if end <= warmup:
            raise ValueError(
                f"scheduler.params.decay_steps ({end}) must be above the length of the warm-up "
                f"({warmup}): the rate decays between the two"
            )


class WsdParams(DecayParams):
    """Constant after the warm-up; decays in the last `wsd_decay_steps`."""

    wsd_decay_steps: Count = own(..., "Length of the decay at the end.")
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = own(
        "exponential", "Shape of the decay."
    )

    def arguments(self, total: int | None) -> dict[str, Any]:
        tail = {"wsd_decay_steps": self.wsd_decay_steps, "wsd_decay_style": self.wsd_decay_style}
        return super().arguments(total) | tail

    def check(self, total: int | None, advice: str) -> None:
        super().check(total, advice)
        falling = (self.decay_steps or total or 0) - self._warmup(total)
        if self.wsd_decay_steps > falling:
            raise ValueError(
                f"scheduler.params.wsd_decay_steps ({self.wsd_decay_steps}) must be at most "
                f"decay_steps minus the warm-up ({falling}): the rate decays in the last steps"
            )


PARAMS: Mapping[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "constant": ConstantParams,
    "linear": DecayParams,
    "cosine": DecayParams,
    "inverse-square-root": DecayParams,
    "WSD": WsdParams,
}


class SchedulerSection(Section):
    """The learning rate schedule; without this section the optimizer's rate is constant."""

    type: Literal[
        "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest",
        "constant", "linear", "cosine", "inverse-square-root", "WSD",
    ] | None = honoured(
        None, "The schedule; case is ignored. null: that of `initialize(lr_scheduler=...)`."
    )  # fmt: skip
    params: SerializeAsAny[SchedulerParams | None] = honoured(
        None, "Parameters of the type, listed below."
    )
    by: By = own(
        "step",
        "What advances the schedule, and the unit of its lengths: each step that is not skipped, "
        "or each epoch.",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # Only `by`: initialize() gets the schedule itself.
        given = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}
        if given.keys() == {"by"}:
            return given
        return normalize_type(raw, "scheduler.type", PARAMS)

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return PARAMS[raw["type"]] if key == "params" else super().section_at(key, raw)

    def arguments(self, train_steps: int | None, epochs: int | None) -> dict[str, Any]:
        """Return the arguments of the formula, as `SchedulerParams.arguments`."""
        total = train_steps if self.by == "step" else epochs
        return {} if self.params is None else self.params.arguments(total)

    def check(self, train_steps: int | None, epochs: int | None, advice: str | None = None) -> None:
        """Raise ValueError if the parameters do not fit the length of the run."""
        if self.params is not None:
            total = train_steps if self.by == "step" else epochs
            self.params.check(total, advice or _SET_ONE[self.by])
