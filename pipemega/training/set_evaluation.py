"""Loss, perplexity or accuracy, and counts of a model on one data set."""

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
from pipemega.training.metric_set import MetricSet
from pipemega.training.metrics import Accuracy
from pipemega.training.validation import output_shard

IGNORE = -100


@dataclass(frozen=True)
class SetResult:
    """The result of one data set.

    Args:
        loss: mean over all tokens that count, or over all samples if labels are not tokens.
        tokens: labels that count; 0 if labels are not tokens.
        samples: samples of the data set.
        seconds: wall time.
        accuracy: share of the images whose class has the largest logit; None: no images.
    """

    name: str
    loss: float
    tokens: int
    samples: int
    seconds: float
    accuracy: float | None = None

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
        if self.accuracy is not None:
            values["accuracy"] = self.accuracy
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

    last, accuracy = engine.plan.rank_of_stage[-1], {"accuracy": Accuracy()}
    has_classes = bool(getattr(data.data, "classes", ()))
    metrics = MetricSet(accuracy, engine.mesh, last, output_shard(engine)) if has_classes else None

    def count_tokens(outputs: Any, labels: Any) -> None:
        if metrics is not None:
            metrics.update(outputs, labels)
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
    found = metrics.compute() if metrics is not None else {}
    return SetResult(data.name, loss, tokens, counts["samples"], seconds, found.get("accuracy"))


def _are_tokens(labels: Tensor) -> bool:
    """Return whether labels are token ids [micro-batch, sequence], and not classes."""
    return labels.dim() == 2 and not labels.is_floating_point()
