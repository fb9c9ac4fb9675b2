"""Decides from globally reduced numbers whether a step is skipped or clipped: arithmetic only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# The epsilon of torch.nn.utils.clip_grad_norm_, for the same clipping.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepReport:
    """The results of one step; equal on all ranks.

    Args:
        loss: weighted mean over the whole batch; may be nan.
        grad_norm: of all logical parameters, before clipping, without the loss scale.
        loss_scale: the scale of this step's gradients.
        learning_rate: of the first parameter group in this step.
        skipped: parameters and optimizer state are unchanged.
        overflow: a gradient was inf or nan, or the loss was (`Attempt.check_loss`).
        weight: number of tokens (or micro-batches) that the loss is the mean of.
        skipped_steps: number of steps skipped so far, including this one.
        rollbacks: number of steps so far, including this one, that ran before their norm was known
            and had to be undone and repeated (`post_validate`).
        stop_votes: number of ranks on which `OptimizerStep.stop_requested` returned True.
        params_norm: of all logical parameters, after the step; None: not computed
            (`monitor.log_params_norm`).
        num_zeros: elements of the gradients of all logical parameters that are 0, after the
            reduction; None: not counted (`monitor.log_num_zeros_in_grad`).
        origin: where the first inf or nan arose; set by `Engine.take_reports` only.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    learning_rate: float
    skipped: bool
    overflow: bool
    weight: float
    skipped_steps: int = 0
    rollbacks: int = 0
    stop_votes: float = 0.0
    params_norm: float | None = None
    num_zeros: int | None = None
    origin: str = ""

    def in_words(self, step: int) -> str:
        """Describe a non-finite step: "loss is nan at step 12 (gradient norm nan)"."""
        if math.isfinite(self.loss):
            return f"the gradient norm is {self.grad_norm:g} at step {step} (loss {self.loss:g})"
        return f"loss is {self.loss:g} at step {step} (gradient norm {self.grad_norm:g})"


@dataclass(frozen=True)
class GlobalStats:
    """Sums over all ranks, from the one all-reduce of a step.

    Args:
        squared_norm: of the gradients of all logical parameters.
        nonfinite_ranks: number of ranks that hold inf or nan.
        loss: weighted sum of the losses of all micro-batches.
        weight: sum of their weights.
        num_microbatches: of all data ranks.
        stop_votes: number of ranks that request a stop.
    """

    squared_norm: float
    nonfinite_ranks: float
    loss: float
    weight: float
    num_microbatches: float
    stop_votes: float

    @classmethod
    def of(cls, sums: Sequence[float]) -> "GlobalStats":
        """Read [squares per layer .., nonfinite_ranks, loss, weight, num_microbatches, votes]."""
        *squares, nonfinite_ranks, loss, weight, num_microbatches, stop_votes = sums
        return cls(sum(squares), nonfinite_ranks, loss, weight, num_microbatches, stop_votes)

    def without_norm(self) -> "GlobalStats":
        """Return these sums with a norm of 0, which neither clips nor overflows."""
        return replace(self, squared_norm=0.0, nonfinite_ranks=0.0)


@dataclass(frozen=True)
class Attempt:
    """A step after its reductions and before its decision.

    Args:
        factor: the reduced gradients still have to be multiplied by this.
        loss_scale, learning_rate, skipped_steps: their values at that time.
        check_loss: treat a loss that is not finite as an overflow.  False with fp16, where a sum
            of losses may exceed the dtype although the gradients are right.
    """

    factor: float
    loss_scale: float
    learning_rate: float
    skipped_steps: int
    check_loss: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do with the gradients: nothing if `report.skipped`, else an update.

    Args:
        factor: multiply the gradients by this before the update; includes clipping.
        nonfinite_ranks: number of ranks that hold inf or nan.
    """

    report: StepReport
    factor: float
    nonfinite_ranks: float

    def same_update(self, other: "Decision") -> bool:
        """Return whether both result in the same parameters and the same state."""
        mine, theirs = self.report, other.report
        return (self.factor, mine.skipped, mine.overflow) == (
            other.factor,
            theirs.skipped,
            theirs.overflow,
        )


def decide(attempt: Attempt, stats: GlobalStats, clip: float) -> Decision:
    """Decide whether to skip the step, and the factor of the gradients; equal on all ranks.

    Args:
        clip: largest norm of the gradients; 0 for no clipping.
    """
    factor, scale = attempt.factor, attempt.loss_scale
    if stats.weight > 0:
        factor *= stats.num_microbatches / stats.weight
    norm = math.sqrt(stats.squared_norm) * factor / scale
    overflow = stats.nonfinite_ranks > 0 or not math.isfinite(norm)
    if overflow and math.isfinite(norm):
        # Only a replica that is counted on another rank is not finite: the norm is still invalid.
        norm = math.inf
    loss = stats.loss / stats.weight if stats.weight else math.nan
    if attempt.check_loss and stats.weight and not math.isfinite(loss):
        # Cross entropy of a class whose logit is -inf: the loss is inf, its gradient is finite.
        overflow = True
    skipped = overflow or not stats.weight
    factor /= scale
    if clip > 0 and not skipped:
        factor *= min(1.0, clip / (norm + _CLIP_EPSILON))
    report = StepReport(
        loss=loss,
        grad_norm=norm,
        loss_scale=scale,
        learning_rate=attempt.learning_rate,
        skipped=skipped,
        overflow=overflow,
        weight=stats.weight,
        skipped_steps=attempt.skipped_steps + skipped,
        stop_votes=stats.stop_votes,
    )
    return Decision(report, factor, stats.nonfinite_ranks)
