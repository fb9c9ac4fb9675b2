"""ValidationSets: evaluates an engine on one or several datasets.

Loss, perplexity or accuracy, and counts of a model on one data set.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipemega.distributed.mesh import gather_objects
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, DataError
from pipemega.monitor.records import evaluation_values
from pipemega.pipeline.model.module import Stage
from pipemega.tensor_parallel.deferred_logits import OutputShard
from pipemega.tensor_parallel.layers import ColumnParallelLinear
from pipemega.training.evaluation_sets import EvaluationSet
from pipemega.training.metrics import Accuracy, MetricSet, Mode, checked_metrics

_NAME = re.compile(r"[A-Za-z][\w.-]*")
_DEFAULT_NAME = "validation"
_REMEDY = "give data that start again at each iter(), not a generator or an iterator"


class ValidationSets:
    """The validation data and metrics of a Trainer.

    Args:
        valid: one set, which is named "validation", or a dict of sets by name; None: no set.
        metrics: the metrics by name; the same for all sets.

    Attributes:
        names: names of the sets, in order.

    Raises:
        ConfigError: a name or a metric is not valid; on every rank.
    """

    def __init__(self, engine: Engine, valid: Any, metrics: Mapping[str, Any] | None) -> None:
        self._engine, self._metrics = engine, checked_metrics(metrics)
        if valid is None:
            valid = {}
        self._sets = dict(valid) if isinstance(valid, Mapping) else {_DEFAULT_NAME: valid}
        for name in self._sets:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} cannot be the name of a validation set: use letters, digits, '_', "
                    "'-' and '.', and begin with a letter",
                    on_every_rank=True,
                )
        self.names, self.metric_names = list(self._sets), list(self._metrics)
        last = engine.plan.rank_of_stage[-1]
        shard = output_shard(engine) if self._metrics else None
        self._metric_set = MetricSet(self._metrics, engine.mesh, last, shard)

    @property
    def value_names(self) -> list[str]:
        """Names of the values of an evaluation; a metric may have several, "<metric>/<part>"."""
        own = ["loss", *self._metrics] if self.names else []
        if own and self._engine.run.logger.tokens_per_sample:
            own.insert(1, "perplexity")
        return own + [f"{name}/{value}" for name in self.names for value in own]

    def mode_of(self, value: str) -> Mode | None:
        """Return which values are better; None if that is not known."""
        for name in self.names:
            value = value.removeprefix(f"{name}/")
        metric = self._metrics.get(value)
        if metric is None and value in ("loss", "perplexity"):
            return "min"
        is_higher = getattr(metric, "higher_is_better", None)
        return None if is_higher is None else "max" if is_higher else "min"

    def evaluate(self) -> dict[str, float]:
        """Evaluate all sets; return their values, as for `Callback.after_evaluation`."""
        values: dict[str, float] = {}
        for name in self.names:
            with self._engine.run.times("evaluation"):
                found = self._evaluate(name)
            values |= {f"{name}/{key}": value for key, value in found.items()}
            if name == self.names[0]:
                values |= found
        return values

    def _evaluate(self, name: str) -> dict[str, float]:
        metrics, numbers = self._metric_set, dict[str, float]()
        metrics.reset()
        # Schedule `auto` may have moved the last stage since the last evaluation.
        metrics.last = self._engine.plan.rank_of_stage[-1]
        metrics.shard = output_shard(self._engine) if self._metrics else None

        def compute() -> dict[str, float]:
            numbers.update(metrics.compute())
            return numbers

        try:
            loss = self._engine.evaluate(
                self._sets[name],
                self._engine.eval_batches,
                on_output=metrics.update if self._metrics else None,
                numbers=compute if self._metrics else None,
                split=name,
            )
        except StopIteration as error:
            raise DataError(
                f"validation set {name!r} ended before training.eval_steps "
                f"({self._engine.eval_batches}) batches: {_REMEDY}",
                on_every_rank=True,
            ) from error
        except (ConfigError, DataError) as error:
            remedy = f": {_REMEDY}" if isinstance(self._sets[name], Iterator) else ""
            raise type(error)(
                f"validation set {name!r}: {error}{remedy}", on_every_rank=error.on_every_rank
            ) from error
        has_tokens = self._engine.run.logger.tokens_per_sample > 0
        return evaluation_values(loss, numbers, has_tokens=has_tokens)


def output_shard(engine: Engine) -> OutputShard | None:
    """Return what the last layer declares about its output; None on ranks without this layer.

    Raises:
        ConfigError: the output is sharded in a way that cannot be declared; on its ranks.
    """
    if engine.mesh.pipeline.rank != engine.plan.rank_of_stage[-1]:
        return None
    stages = [stage for stage in engine.local_stages if isinstance(stage, Stage)]
    last = stages[-1].last_layer
    shard: OutputShard | None = getattr(last, "output_shard", None)
    if isinstance(last, ColumnParallelLinear) and shard is None and not last.gather_output:
        raise ConfigError(
            f"metrics need the whole output, and the last layer, a ColumnParallelLinear of "
            f"{len(last.local_blocks)} blocks, returns the slices of one tensor rank: set "
            "gather_output=True"
        )
    return shard


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
