"""Compares the gradients of the split model with those of the unsplit model."""

import math
from dataclasses import dataclass

from torch import Tensor

from pipemega.hf_check.reference import Gradients

# In float64 only the order of sums differs.
TOLERANCE = 1e-10
# A gradient below this fraction of the largest one is rounding error.
_SMALL = 1e-5


@dataclass(frozen=True)
class Difference:
    """One parameter.

    Args:
        name: HF's name.
        relative: largest difference, relative to the largest value of this gradient.
        why: if the gradients cannot be compared.
    """

    name: str
    relative: float
    why: str = ""


@dataclass(frozen=True)
class GradientComparison:
    """The result for one batch.

    Args:
        kind: of the batch.
        loss, reference_loss: of the split and the unsplit model.
        differences: of all parameters, the largest first.
    """

    kind: str
    loss: float
    reference_loss: float
    differences: tuple[Difference, ...]

    @property
    def loss_difference(self) -> float:
        difference = abs(self.loss - self.reference_loss) / max(1.0, abs(self.reference_loss))
        return difference if math.isfinite(difference) else math.inf

    @property
    def unequal(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if not d.relative <= TOLERANCE)

    @property
    def is_equal(self) -> bool:
        return self.loss_difference <= TOLERANCE and not self.unequal


def compare(kind: str, split: Gradients, reference: Gradients) -> GradientComparison:
    """Compare every parameter that either model has."""
    largest = max((_largest(g) for g in reference.by_name.values()), default=0.0)
    differences = [
        _difference(name, split.by_name.get(name), reference.by_name.get(name), largest)
        for name in sorted({*split.by_name, *reference.by_name})
    ]
    differences.sort(key=lambda d: -d.relative)
    return GradientComparison(kind, split.loss, reference.loss, tuple(differences))


def _difference(
    name: str, mine: Tensor | None, reference: Tensor | None, largest: float
) -> Difference:
    if mine is None:
        return Difference(name, math.inf, "the split model does not have it")
    if reference is None:
        return Difference(name, math.inf, "only the split model has it")
    if mine.shape != reference.shape:
        shapes = f"{list(mine.shape)}, not {list(reference.shape)}"
        return Difference(name, math.inf, f"the split model has shape {shapes}")
    scale = max(_largest(reference), _SMALL * largest)
    if scale == 0.0:
        return Difference(name, _largest(mine))
    relative = _largest(mine - reference) / scale
    return Difference(name, relative if math.isfinite(relative) else math.inf)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
