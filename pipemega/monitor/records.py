"""What a run says about itself: a record per step and per evaluation.  Plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

# DeepSpeed's prefix; its users plot these tags over consumed samples.
PREFIX = "Train/Samples/"

_NO_EXTRAS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as every rank agrees on it.

    None means "not known here" and is left out of plots; NaN is a value, and is shown.

    Args:
        step: the number of this step, from 1; skipped steps count.
        consumed_samples: samples of the whole run up to and with this step.
        consumed_tokens: likewise, in tokens.
        loss: mean loss of the step.
        lr: learning rate that the step used.
        grad_norm: norm over the logical parameters, before clipping.
        loss_scale: the fp16 loss scale; None without fp16.
        step_seconds: wall-clock time of the step.
        samples_per_second, tokens_per_second: of all ranks together.
        tflops_per_device: model FLOPs per second and device / 1e12; recompute does not count.
        mfu: tflops_per_device over the device's peak, 0 to 1.
        skipped_steps: steps of the run so far that changed no parameter (fp16 overflow).
        nan_steps: steps of the run so far with a loss or a gradient norm that is not finite.
        memory_gib: peak memory of the fullest device.
        extra: more numbers by name; a name without "/" gets the prefix of the others.
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    lr: float
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    grad_norm: float | None = None
    loss_scale: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    skipped_steps: int = 0
    nan_steps: int = 0
    memory_gib: float | None = None
    extra: Mapping[str, float] = field(default_factory=lambda: _NO_EXTRAS)

    kind: ClassVar[str] = "train"

    def scalars(self) -> dict[str, float]:
        """Tag -> value for whatever draws curves; what is not known is absent."""
        named: dict[str, float | None] = {
            "train_loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
            "skipped_steps": self.skipped_steps,
            "nan_steps": self.nan_steps,
            "memory_gib": self.memory_gib,
            **self.extra,
        }
        return {_tag(name): value for name, value in named.items() if value is not None}

    def row(self) -> dict[str, object]:
        """The fields by name, for a line of JSON; what is not known is None."""
        return {"kind": self.kind} | self.__dict__ | {"extra": dict(self.extra)}


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One pass over held-out data.

    Args:
        step: the training step that it followed.
        consumed_samples: training samples up to then.
        loss: mean loss over the pass.
        seconds: wall-clock time of the pass.
        split: "validation" or "test".
    """

    step: int
    consumed_samples: int
    loss: float
    seconds: float
    split: str = "validation"

    @property
    def kind(self) -> str:
        return self.split

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that has no float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def scalars(self) -> dict[str, float]:
        """Tag -> value; the validation loss has the tag that DeepSpeed gives it."""
        name = "eval" if self.split == "validation" else self.split
        return {_tag(f"{name}_loss"): self.loss, _tag(f"{name}_perplexity"): self.perplexity}

    def row(self) -> dict[str, object]:
        """The fields by name, for a line of JSON."""
        return {
            "kind": self.kind,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class TimelineRecord:
    """One step that was timed instruction by instruction.

    Args:
        step: the number of that step.
        consumed_samples: samples up to and with it.
        schedule: whose plan it was.
        makespan: seconds from the first instruction of any rank to the last.
        span: the longest that any one rank took, from its own first instruction to its own last.
        bubble: share of the makespan that ranks did not work, in the mean, 0 to 1.
        predicted_makespan: what the simulator gives for the plan with the costs of this step.
        busy, waited: seconds that each rank worked, and waited for messages.
        picture: a PNG file of the timeline; None where none could be drawn.
    """

    step: int
    consumed_samples: int
    schedule: str
    makespan: float
    span: float
    bubble: float
    predicted_makespan: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    picture: Path | None = None

    kind: ClassVar[str] = "timeline"
    picture_tag: ClassVar[str] = PREFIX + "timeline"

    def scalars(self) -> dict[str, float]:
        """Tag -> value; the numbers of single ranks are in `row` alone."""
        return {
            _tag("pipeline_makespan"): self.makespan,
            _tag("pipeline_span"): self.span,
            _tag("pipeline_bubble"): self.bubble,
            _tag("pipeline_predicted_makespan"): self.predicted_makespan,
        }

    def row(self) -> dict[str, object]:
        """The fields by name, for a line of JSON; the picture by its file."""
        picture = None if self.picture is None else str(self.picture)
        return {"kind": self.kind} | self.__dict__ | {"picture": picture}


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that befell the run.

    Args:
        step: after which step; of a step, its number.
        consumed_samples: samples up to then.
        name: "loss_spike", "nonfinite", "rollback", "straggler".
        values: numbers that tell how much.
        text: the same for people.
    """

    step: int
    consumed_samples: int
    name: str
    values: Mapping[str, float]
    text: str

    kind: ClassVar[str] = "event"

    def scalars(self) -> dict[str, float]:
        """Tag -> value."""
        return {_tag(f"{self.name}_{key}"): value for key, value in self.values.items()}

    def row(self) -> dict[str, object]:
        """The fields by name, for a line of JSON."""
        return {"kind": self.kind} | self.__dict__ | {"values": dict(self.values)}


Record = StepRecord | EvalRecord | TimelineRecord | EventRecord


def _tag(name: str) -> str:
    return name if "/" in name else PREFIX + name
