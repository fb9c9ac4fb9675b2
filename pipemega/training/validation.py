"""ValidationSets: evaluates an engine on one or several datasets."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, DataError
from pipemega.monitor import evaluation_values
from pipemega.pipeline.module import Stage
from pipemega.tensor_parallel.layers import ColumnParallelLinear
from pipemega.tensor_parallel.output_shard import OutputShard
from pipemega.training.callback import Mode
from pipemega.training.metric_set import MetricSet, checked_metrics

_NAME = re.compile(r"[A-Za-z][\w.-]*")
_DEFAULT_NAME = "validation"
_REMEDY = "give data that start again at each iter(), not a generator or an iterator"


class ValidationSets:
    """The validation data and metrics of a Trainer.

    Args:
        valid: one set, which is named "validation", or a dict of sets by name; None: no set.
        metrics: by name; the same for all sets.

    Attributes:
        names: of the sets, in order.

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
