"""What becomes of a step, from the numbers that all ranks agree on: arithmetic alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Of torch.nn.utils.clip_grad_norm_, so that clipping here is clipping there.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepReport:
    """What one step saw and did; the same on every rank.

    Args:
        loss: over the whole batch, by weight; nan is shown as nan.
        grad_norm: of all logical parameters, before clipping, without the loss scale.
        loss_scale: with which this step's gradients were made.
        learning_rate: of the first parameter group in this step.
        skipped: parameters and optimizer state are as before.
        overflow: because gradients held inf or nan, or the loss was (`Attempt.heeds_loss`).
        weight: tokens (or micro-batches) that the loss is the mean of.
        skipped_steps: so far, with this one.
        rollbacks: steps so far, with this one, that were taken back and done again because they
            had not waited for the norm (`post_validate`).
        votes: how many ranks said yes to `OptimizerStep.asks`.
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
    votes: float = 0.0

    def in_words(self, step: int) -> str:
        """A step that was not finite: "loss is nan at step 12 (gradient norm nan)"."""
        if math.isfinite(self.loss):
            return f"the gradient norm is {self.grad_norm:g} at step {step} (loss {self.loss:g})"
        return f"loss is {self.loss:g} at step {step} (gradient norm {self.grad_norm:g})"


@dataclass(frozen=True)
class World:
    """What the one all-reduce brings: sums over all ranks."""

    squared_norm: float
    nonfinite_ranks: float
    loss: float
    weight: float
    num_microbatches: float
    votes: float

    @classmethod
    def of(cls, sums: Sequence[float]) -> "World":
        """From [squares of each layer .., ranks with inf or nan, loss, weight, number, votes]."""
        *squares, nonfinite_ranks, loss, weight, count, votes = sums
        return cls(sum(squares), nonfinite_ranks, loss, weight, count, votes)

    def without_norm(self) -> "World":
        """The same, had all gradients been zeros: a norm that neither clips nor overflows."""
        return replace(self, squared_norm=0.0, nonfinite_ranks=0.0)


@dataclass(frozen=True)
class Attempt:
    """One step as it stands before its decision.

    Args:
        factor: that the reduced gradients still have to be multiplied by.
        loss_scale, learning_rate, skipped_steps: as they were then.
        heeds_loss: a loss that is not finite counts like gradients that are not. Not with fp16,
            where a sum of losses may be beyond the dtype and the gradients still be right.
    """

    factor: float
    loss_scale: float
    learning_rate: float
    skipped_steps: int
    heeds_loss: bool = True


@dataclass(frozen=True)
class Decision:
    """What shall be done with the gradients: nothing if `report.skipped`, else a step.

    Args:
        factor: what they are multiplied by before it, clipping included.
        nonfinite_ranks: that hold inf or nan.
    """

    report: StepReport
    factor: float
    nonfinite_ranks: float

    def does_as(self, other: "Decision") -> bool:
        """Whether it leaves the same parameters and the same state."""
        mine, theirs = self.report, other.report
        return (self.factor, mine.skipped, mine.overflow) == (
            other.factor,
            theirs.skipped,
            theirs.overflow,
        )


def decide(attempt: Attempt, world: World, clip: float) -> Decision:
    """Skip, or step with which factor: the same on every rank, since all have the same numbers.

    Args:
        clip: largest norm of the gradients; 0 for no clipping.
    """
    factor, scale = attempt.factor, attempt.loss_scale
    if world.weight > 0:
        factor *= world.num_microbatches / world.weight
    norm = math.sqrt(world.squared_norm) * factor / scale
    overflow = world.nonfinite_ranks > 0 or not math.isfinite(norm)
    if overflow and math.isfinite(norm):
        # Only a copy that counts elsewhere went wrong: still no norm to believe in.
        norm = math.inf
    loss = world.loss / world.weight if world.weight else math.nan
    if attempt.heeds_loss and world.weight and not math.isfinite(loss):
        # Cross entropy of a class whose logit is -inf: the loss is inf, its gradient is finite.
        overflow = True
    skipped = overflow or not world.weight
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
        weight=world.weight,
        skipped_steps=attempt.skipped_steps + skipped,
        votes=world.votes,
    )
    return Decision(report, factor, world.nonfinite_ranks)
