"""Loss, perplexity and counts of a model on one data set."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipemega.distributed.mesh import gather_objects
from pipemega.engine.engine import Engine
from pipemega.monitor.records import evaluation_values
from pipemega.training.evaluation_sets import EvaluationSet

IGNORE = -100


@dataclass(frozen=True)
class SetResult:
    """The result of one data set.

    Args:
        loss: mean over all tokens that count, or over all samples if labels are not tokens.
        tokens: labels that count; 0 if labels are not tokens.
        samples: samples of the data set.
        seconds: wall time.
    """

    name: str
    loss: float
    tokens: int
    samples: int
    seconds: float

    @property
    def perplexity(self) -> float | None:
        """exp(loss), inf if it overflows; None if labels are not tokens."""
        return evaluation_values(self.loss, {}, has_tokens=self.tokens > 0).get("perplexity")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; null for inf and nan."""
        values = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
        }
        return {key: value if _is_json(value) else None for key, value in values.items()}


def _is_json(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def evaluate_set(
    engine: Engine,
    data: EvaluationSet,
    on_batch: Callable[[int], object] = lambda samples: None,
) -> SetResult:
    """Evaluate one data set.  Collective.

    Args:
        on_batch: called on every rank with the samples of each global batch.
    """
    counts = {"tokens": 0, "samples": 0}
    # All tensor ranks have the same labels.
    counts_tokens = engine.mesh.tensor.rank == 0

    def count_tokens(outputs: Any, labels: Any) -> None:
        if counts_tokens and isinstance(labels, Tensor) and _are_tokens(labels):
            counts["tokens"] += int((labels != IGNORE).sum())

    def count_samples(samples: int) -> None:
        counts["samples"] += samples
        on_batch(samples)

    started = time.perf_counter()
    loss = engine.evaluate(
        data.data, on_output=count_tokens, on_batch=count_samples, split=data.name
    )
    seconds = time.perf_counter() - started
    tokens = sum(gather_objects(counts["tokens"], engine.mesh.world))
    return SetResult(data.name, loss, tokens, counts["samples"], seconds)


def _are_tokens(labels: Tensor) -> bool:
    """Return whether labels are token ids [micro-batch, sequence], and not classes."""
    return labels.dim() == 2 and not labels.is_floating_point()
