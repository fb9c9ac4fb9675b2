"""The config section `scheduler`: the learning rate over the steps, or over the epochs.

DeepSpeed's five types (its lr_schedules.py) with its keys and defaults, and Megatron's five (its
optimizer_param_scheduler.py).  A class has the keys of a type, and the formula: `rate` gets the
number of steps taken, and returns the rate of the *next* optimizer step.  DeepSpeed's WarmupLR,
WarmupDecayLR and WarmupCosineLR count from -1: the first two steps have the same rate.  This is
kept: a config gives the same curve.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import SerializeAsAny

from pipemega.config.declarations import (
    Count,
    NotNegative,
    Section,
    SectionClass,
    Share,
    Whole,
    honoured,
    ignored,
    own,
    rule,
)
from pipemega.config.sections.optimizer_section import normalize_type

Warmup = Literal["log", "linear"]
By = Literal["step", "epoch", "sample"]
# DeepSpeed's OneCycle sets Adam's beta2 to this.
_CYCLE_BETA2 = 0.99
_TOTAL = "Length of the whole run; null: the length that the section `training` sets."
_SET_ONE = {
    "step": "so is training.train_steps, its default: set one of them",
    "epoch": "so is training.epochs, its default: set one of them",
    "sample": "so is training.train_samples, its default: set one of them",
}


class SchedulerParams(Section):
    """Keys of every schedule; lengths are in steps, or with `scheduler.by: "epoch"` in epochs."""

    def lengths_in_samples(self) -> list[str]:
        """Return the keys of lengths in samples that are set."""
        return []

    def lengths_in_steps(self) -> list[str]:
        """Return the keys of lengths in steps that are set and have a counterpart in samples."""
        return []

    def arguments(self, total: int | None) -> dict[str, Any]:
        """Return the values that the formula uses, without null ones, for a page.

        Args:
            total: length of the run, the default of other lengths.
        """
        return {name: value for name, value in self if value is not None}

    def with_length(self, total: int | None, by: By) -> "SchedulerParams":
        """Return parameters with the same curve in a run of another length."""
        return self

    def rate(self, step: int, lr: float) -> float:
        """Return the rate of the next optimizer step.

        Args:
            step: steps (or epochs, samples) so far.
            lr: the rate of the optimizer.
        """
        return lr

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return Adam's betas of the next step; None: the schedule does not change them."""
        return None

    def check(self, total: int | None, advice: str) -> None:
        """Raise ValueError if these parameters do not fit the length of the run.

        Args:
            advice: the end of the message if the length is needed, and None.
        """


class DeepSpeedParams(SchedulerParams):
    last_batch_iteration: int = honoured(
        -1, "Skip the steps of the schedule up to this one, counted from 0; -1: skip none.", ge=-1
    )


def _warmup_share(kind: Warmup, length: int, iteration: int) -> float | None:
    """Return the completed share of DeepSpeed's warm-up, of 2 steps or more; None: it is over."""
    length = max(2, length)
    if iteration >= length:
        return None
    return math.log(iteration + 1) / math.log(length) if kind == "log" else iteration / length


class WarmupLRParams(DeepSpeedParams):
    """Rises from min to max, then stays constant."""

    warmup_min_lr: NotNegative = honoured(0.0, "Rate of the first step.")
    warmup_max_lr: NotNegative | None = honoured(
        None, "Rate after the warm-up; null: the optimizer's `lr`."
    )
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; 0 and 1 count as 2.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")

    def rate(self, step: int, lr: float) -> float:
        iteration, low = step - 1, self.warmup_min_lr
        if iteration < 0:
            return low
        share = _warmup_share(self.warmup_type, self.warmup_num_steps, iteration)
        high = lr if self.warmup_max_lr is None else self.warmup_max_lr
        return low + (high - low) * (1.0 if share is None else share)


class _WithTotal(DeepSpeedParams):
    total_num_steps: Count | None = honoured(None, _TOTAL)

    def arguments(self, total: int | None) -> dict[str, Any]:
        return {**super().arguments(total), "total_num_steps": self.total_num_steps or total}

    def with_length(self, total: int | None, by: By) -> SchedulerParams:
        return self.model_copy(update={"total_num_steps": self.total_num_steps or total})

    def check(self, total: int | None, advice: str) -> None:
        if self.total_num_steps is None and total is None:
            raise ValueError(f"scheduler.params.total_num_steps is missing, and {advice}")


class WarmupDecayLRParams(_WithTotal):
    """Rises from min to max, then falls linearly."""

    warmup_min_lr: NotNegative = honoured(
        0.0, "Rate of the first step, and at the end of the decay."
    )
    warmup_max_lr: NotNegative = honoured(0.001, "Rate after the warm-up.")
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; 0 and 1 count as 2.")
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")

    def rate(self, step: int, lr: float) -> float:
        iteration, low, total = step - 1, self.warmup_min_lr, self.total_num_steps or 0
        if iteration < 0:
            return low
        share = _warmup_share(self.warmup_type, self.warmup_num_steps, iteration)
        if share is None:
            steps = max(1.0, total - max(2, self.warmup_num_steps))
            share = max(0.0, (total - iteration) / steps)
        return low + (self.warmup_max_lr - low) * share


class WarmupCosineLRParams(_WithTotal):
    """Rises, then falls along a cosine; in ratios of the optimizer's rate."""

    warmup_min_ratio: Share = honoured(
        0.0, "Rate at the start of the warm-up, relative to the optimizer's `lr`."
    )
    warmup_num_steps: Whole = honoured(1000, "Length of the warm-up; 0 and 1 count as 2.")
    cos_min_ratio: Share = honoured(
        1e-4, "Rate at the end of the cosine, relative to the optimizer's `lr`."
    )
    warmup_type: Warmup = honoured("log", "Shape of the warm-up.")

    def rate(self, step: int, lr: float) -> float:
        iteration, low, total = step - 1, self.warmup_min_ratio, self.total_num_steps or 0
        if iteration < 0:
            return 0.0
        share = _warmup_share(self.warmup_type, self.warmup_num_steps, iteration)
        if share is not None:
            return lr * (low + (1 - low) * share)
        warmup = max(2, self.warmup_num_steps)
        progress = min(1.0, (iteration - warmup + 1) / max(1, total - warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return lr * max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


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

    def with_length(self, total: int | None, by: By) -> SchedulerParams:
        return self.model_copy(update=self.arguments(total))

    def rate(self, step: int, lr: float) -> float:
        low, over = self.cycle_min_lr, self._steps_over(step)
        if over <= 0:
            return low + (self.cycle_max_lr - low) * self._height(step)
        if self.decay_step_size == 0:
            return low
        return low / (1 + self.decay_lr_rate * over / self.decay_step_size)

    def betas(self, step: int) -> tuple[float, float] | None:
        """beta1 goes from max to min to max; it is min in DeepSpeed's first step."""
        if not self.cycle_momentum:
            return None
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
        return step - (self.cycle_first_step_size + (self.cycle_second_step_size or 0))

    def _height(self, step: int) -> float:
        """Return the height within the cycle: 0 at its ends, 1 at its peak."""
        rises = step <= self.cycle_first_step_size
        at = step if rises else -self._steps_over(step)
        size = self.cycle_first_step_size if rises else self.cycle_second_step_size or 1
        stairs = self.cycle_first_stair_count if rises else self.cycle_second_stair_count or 0
        # Stairs from integers: the rounded height may be just below a stair.
        return math.floor(at * stairs / size) / stairs if stairs > 0 else at / size


class LRRangeTestParams(DeepSpeedParams):
    """Rises without limit, to find the rate at which training diverges."""

    lr_range_test_min_lr: NotNegative = honoured(1e-3, "Rate of the first step.")
    lr_range_test_step_size: Count = honoured(2000, "Steps per rise.")
    lr_range_test_step_rate: NotNegative = honoured(
        1.0, "Size of a rise, as a multiple of the first rate."
    )
    lr_range_test_staircase: bool = honoured(False, "Rise in stairs.")

    def rate(self, step: int, lr: float) -> float:
        intervals = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


class ConstantParams(SchedulerParams):
    """Megatron's schedules: linear warm-up from `warmup_init_lr`, then constant."""

    max_lr: NotNegative | None = own(None, "Rate after the warm-up; null: the optimizer's `lr`.")
    warmup_init_lr: NotNegative = own(0.0, "Rate of the first step of the warm-up.")
    warmup_steps: Whole = own(0, "Length of the warm-up.")
    warmup_samples: Whole | None = own(None, "Length of the warm-up in samples.")
    warmup_fraction: Share | None = own(
        None, "Length of the warm-up as a share of `decay_steps` or `decay_samples`."
    )
    decay_steps: Count | None = own(None, "Length of the schedule; null: the length of the run.")
    decay_samples: Count | None = own(None, "Length of the schedule in samples.")
    min_lr: NotNegative = ignored(
        0.0, "Smallest rate.", "a constant rate does not decay", agrees=[0, 0.0]
    )

    @rule("warmup_fraction", "warmup_steps", "warmup_samples")
    def _one_length_of_warmup(self) -> Iterator[str]:
        keys = ("warmup_steps", "warmup_samples", "warmup_fraction")
        given = [f"scheduler.params.{k}" for k in keys if getattr(self, k) not in (None, 0)]
        if self.warmup_fraction is not None and len(given) > 1:
            yield f"{' and '.join(given)} are both given: keep one"

    def lengths_in_samples(self) -> list[str]:
        return [k for k in _IN_STEPS if getattr(self, k, None) is not None]

    def lengths_in_steps(self) -> list[str]:
        return [k for k in _IN_STEPS.values() if getattr(self, k, None)]

    def _key(self, length: str) -> str:
        """Return the name of a length ("decay") in the unit of those that are set."""
        unit = "samples" if self.lengths_in_samples() else "steps"
        return f"scheduler.params.{length}_{unit}"

    @property
    def _decay(self) -> int | None:
        return self.decay_samples or self.decay_steps

    def arguments(self, total: int | None) -> dict[str, Any]:
        named = {
            "max_lr": self.max_lr,
            "min_lr": self.min_lr,
            "init_lr": self.warmup_init_lr,
            "warmup_steps": self._warmup(total),
            "decay_steps": self._decay or total,
        }
        return {name: value for name, value in named.items() if value is not None}

    def check(self, total: int | None, advice: str) -> None:
        if self.warmup_fraction is not None and not (self._decay or total):
            raise ValueError(
                f"scheduler.params.warmup_fraction is a share of {self._key('decay')}, which is "
                f"missing, and {advice}"
            )

    def with_length(self, total: int | None, by: By) -> SchedulerParams:
        key = "decay_samples" if by == "sample" else "decay_steps"
        return self.model_copy(update={key: self._decay or total})

    def _warmup(self, total: int | None) -> int:
        if self.warmup_fraction is None:
            return self.warmup_samples or self.warmup_steps
        return round(self.warmup_fraction * (self._decay or total or 0))

    def rate(self, step: int, lr: float) -> float:
        low, high = self.warmup_init_lr, lr if self.max_lr is None else self.max_lr
        warmup = self._warmup(None)
        if warmup > 0 and step <= warmup:
            return low + (high - low) * step / warmup
        return self.rate_after(step, warmup, high)

    def rate_after(self, step: int, warmup: int, high: float) -> float:
        """Return the rate after the warm-up.

        Args:
            warmup: the length of the warm-up.
            high: the rate at its end.
        """
        return high


class DecayParams(ConstantParams):
    """Decays from `max_lr` to `min_lr`, which is reached at `decay_steps`."""

    min_lr: NotNegative = own(0.0, "Rate from `decay_steps` on.")

    def check(self, total: int | None, advice: str) -> None:
        super().check(total, advice)
        end, warmup = self._decay or total, self._warmup(total)
        if end is None:
            raise ValueError(f"{self._key('decay')} is missing, and {advice}")
        if end <= warmup:
            raise ValueError(
                f"{self._key('decay')} ({end}) must be above the length of the warm-up "
                f"({warmup}): the rate decays between the two"
            )

    def rate_after(self, step: int, warmup: int, high: float) -> float:
        end = self._decay or 0
        if step > end:
            return self.min_lr
        return self.decayed(step, warmup, end, high)

    def decayed(self, step: int, warmup: int, end: int, high: float) -> float:
        """Return the rate between the end of the warm-up and `end`."""
        share = self.share(step - warmup, end - warmup)
        return self.min_lr + (high - self.min_lr) * share

    def share(self, step: int, steps: int) -> float:
        """Return the remaining share of max - min after `step` of `steps`."""
        return _DECAYS["linear"](max(0, step) / max(1, steps))


class CosineParams(DecayParams):
    def share(self, step: int, steps: int) -> float:
        return _DECAYS["cosine"](max(0, step) / max(1, steps))


class InverseSquareRootParams(DecayParams):
    def decayed(self, step: int, warmup: int, end: int, high: float) -> float:
        scale = high * math.sqrt(max(warmup, 1))
        return max(self.min_lr, scale / math.sqrt(max(step, 1)))


class WsdParams(DecayParams):
    """Constant after the warm-up; decays in the last `wsd_decay_steps`."""

    wsd_decay_steps: Count | None = own(
        None, "Length of the decay at the end; required, unless `wsd_decay_samples` is set."
    )
    wsd_decay_samples: Count | None = own(
        None, "Length of the decay at the end in samples, instead of `wsd_decay_steps`."
    )
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = own(
        "exponential", "Shape of the decay."
    )

    @rule("wsd_decay_steps", "wsd_decay_samples")
    def _has_a_tail(self) -> Iterator[str]:
        if self._tail is None:
            yield (
                "scheduler.params.wsd_decay_steps is missing: WSD needs the length of its decay "
                "(or wsd_decay_samples)"
            )

    @property
    def _tail(self) -> int | None:
        return self.wsd_decay_samples or self.wsd_decay_steps

    def arguments(self, total: int | None) -> dict[str, Any]:
        tail = {"wsd_decay_steps": self._tail, "wsd_decay_style": self.wsd_decay_style}
        return super().arguments(total) | tail

    def check(self, total: int | None, advice: str) -> None:
        super().check(total, advice)
        falling = (self._decay or total or 0) - self._warmup(total)
        if self._tail is not None and self._tail > falling:
            raise ValueError(
                f"{self._key('wsd_decay')} ({self._tail}) must be at most "
                f"{self._key('decay').rsplit('.')[-1]} minus the warm-up ({falling}): the decay "
                "is the end of the schedule"
            )

    def decayed(self, step: int, warmup: int, end: int, high: float) -> float:
        tail = self._tail or 0
        ratio = max(0, step - (end - tail)) / max(1, tail)
        return self.min_lr + (high - self.min_lr) * _DECAYS[self.wsd_decay_style](ratio)


_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1 - ratio,
    "cosine": lambda ratio: (math.cos(math.pi * ratio) + 1) / 2,
    "exponential": lambda ratio: float(2 * 0.5**ratio - 1),
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}
"""Shape of a decay: completed share of its steps -> remaining share of max - min."""

_IN_STEPS = {
    "warmup_samples": "warmup_steps",
    "decay_samples": "decay_steps",
    "wsd_decay_samples": "wsd_decay_steps",
}
"""Key of a length in samples -> the key in steps."""

PARAMS: Mapping[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "constant": ConstantParams,
    "linear": DecayParams,
    "cosine": CosineParams,
    "inverse-square-root": InverseSquareRootParams,
    "WSD": WsdParams,
}
MEGATRON = tuple(name for name, params in PARAMS.items() if issubclass(params, ConstantParams))

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(PARAMS)]


class SchedulerSection(Section):
    """The learning rate schedule; without this section the optimizer's rate is constant."""

    type: ScheduleName | None = honoured(
        None, "The schedule; case is ignored. null: `initialize(lr_scheduler=...)` gives it."
    )
    params: SerializeAsAny[SchedulerParams | None] = honoured(
        None, "Parameters of the type, listed below."
    )
    by: By = own(
        "step",
        "What advances the schedule, and the unit of its lengths: each step that is not skipped, "
        'each epoch, or each sample of the steps that are not skipped. `"sample"` is the default '
        "if a length of `params` is in samples. For Megatron's types it is also the default if "
        "`training.train_samples` is set and no length of `params` is in steps.",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # Only `by`: initialize() gets the schedule itself.
        given = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}
        if given.keys() == {"by"}:
            return given
        params = given.get("params")
        named = {k for k, v in params.items() if v is not None} if isinstance(params, dict) else ()
        if "by" not in given and not _IN_STEPS.keys().isdisjoint(named):
            raw = {**raw, "by": "sample"}
        return normalize_type(raw, "scheduler.type", PARAMS)

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        return PARAMS[raw["type"]] if key == "params" else super().section_at(key, raw)

    @rule("by", "params")
    def _lengths_have_the_unit(self) -> Iterator[str]:
        params, by_sample = self.params, self.by == "sample"
        if by_sample and not isinstance(params, ConstantParams):
            yield (
                f"scheduler.by is 'sample', and {self.type or 'the schedule of initialize()'} does "
                f"not count samples: set it to 'step', or use {', '.join(MEGATRON)}"
            )
        elif params is not None:
            wrong = params.lengths_in_steps() if by_sample else params.lengths_in_samples()
            names = {**_IN_STEPS, **{value: key for key, value in _IN_STEPS.items()}}
            for key in wrong:
                yield (
                    f"scheduler.by is {self.by!r}, and scheduler.params.{key} is a length in "
                    f"{key.split('_')[-1]}: give {names[key]}, or change scheduler.by; all lengths "
                    "of a schedule have one unit"
                )

    def arguments(self, length: "RunLength") -> dict[str, Any]:
        """Return the values that the formula uses, as `SchedulerParams.arguments`."""
        return {} if self.params is None else self.params.arguments(length.in_unit(self.by))

    def check(self, length: "RunLength", advice: str | None = None) -> None:
        """Raise ValueError if the parameters do not fit the length of the run."""
        if self.params is not None:
            self.params.check(length.in_unit(self.by), advice or _SET_ONE[self.by])


class RunLength(NamedTuple):
    """The length of a run in each unit; None: not known."""

    steps: int | None = None
    epochs: int | None = None
    samples: int | None = None

    def in_unit(self, by: By) -> int | None:
        """Return the length in the unit of `scheduler.by`."""
        return {"step": self.steps, "epoch": self.epochs, "sample": self.samples}[by]


def count_samples(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set `scheduler.by` of a raw config to "sample" if only its train_samples gives a length.

    As in Megatron-LM, for Megatron's types only.
    """
    training, scheduler = raw.get("training"), raw.get("scheduler")
    if not isinstance(training, Mapping) or not isinstance(scheduler, Mapping):
        return raw
    params, kind = scheduler.get("params") or {}, scheduler.get("type")
    if not isinstance(params, Mapping) or not isinstance(kind, str):
        return raw
    is_megatrons = kind.lower() in {name.lower() for name in MEGATRON}
    in_steps = any(params.get(key) for key in _IN_STEPS.values())
    if training.get("train_samples") is None or scheduler.get("by") or in_steps or not is_megatrons:
        return raw
    return {**raw, "scheduler": {**scheduler, "by": "sample"}}


def errors_of_length(config: Any) -> Iterable[str]:
    """Raise ValueError if the schedule of a config does not fit the length of its run."""
    training, section = config.training, config.scheduler
    if section is None:
        return ()
    length = RunLength(training.train_steps, training.epochs, training.train_samples)
    # The steps or samples of other lengths depend on the data or the mesh, which initialize() has.
    is_known_later = section.by != "epoch" and training.has_length
    if length.in_unit(section.by) is not None or not is_known_later:
        section.check(length)
    return ()
