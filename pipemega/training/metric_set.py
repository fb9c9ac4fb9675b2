"""MetricSet: the metrics of one evaluation, over micro-batches, data ranks and stages."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import ConfigError, DataError, PipelineError, PipemegaError
from pipemega.tensor_parallel.output_shard import OutputShard
from pipemega.training.metrics import Metric

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z][\w.-]*")
# Fields of the record of an evaluation.
_RESERVED = ("kind", "split", "step", "consumed_samples", "loss", "seconds")


class MetricSet:
    """Adds up metrics on the ranks of the last stage, and gives their values to all ranks.

    Args:
        metrics: by name; each a `Metric`, or a metric or MetricCollection of torchmetrics.
        mesh: values are reduced over its data axis.
        last: pipeline rank of the last stage.
        shard: declares that the outputs are shards; None: they are whole.
    """

    def __init__(
        self, metrics: Mapping[str, Any], mesh: Mesh, last: int, shard: OutputShard | None
    ) -> None:
        self._mesh, self.last, self.shard = mesh, last, shard
        self._metrics = {k: m for k, m in metrics.items() if isinstance(m, Metric)}
        self._torchmetrics = {k: m for k, m in metrics.items() if not isinstance(m, Metric)}
        self._sums: dict[str, Tensor] = {}
        self._updates = 0
        for metric in self._torchmetrics.values():
            _reduce_over_data(metric, mesh)

    def reset(self) -> None:
        """Start an evaluation."""
        self._sums, self._updates = {}, 0
        for metric in self._torchmetrics.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Any, labels: Any) -> None:
        """Add one micro-batch; on the ranks of the last stage, collective over their tensor axis.

        Raises:
            DataError, PipelineError: outputs or labels do not fit a metric; with its name.
        """
        _require_outputs(outputs, [*self._metrics, *self._torchmetrics])
        self._updates += 1
        for name, metric in self._metrics.items():
            new = _with_name(name, self._sums_of, metric, outputs, labels)
            self._sums[name] = self._sums[name] + new if name in self._sums else new
        if not self._torchmetrics:
            return
        whole = outputs if self.shard is None else self.shard.gather(outputs)
        for name, metric in self._torchmetrics.items():
            _with_name(name, metric.update, whole, labels)

    def _sums_of(self, metric: Metric, outputs: Any, labels: Any) -> Tensor:
        """Return the sums of a metric over one micro-batch: [number of sums] fp64."""
        if self.shard is None:
            found = metric.sums(outputs, labels)
        else:
            found = metric.sums_of_shards(outputs, labels, self.shard)
        sums = [torch.as_tensor(x).to(self._mesh.device).double() for x in found]
        if any(x.dim() for x in sums):
            shapes = ", ".join(str(list(x.shape)) for x in sums)
            raise DataError(f"sums() returns tensors of the shapes {shapes}: return scalars")
        return torch.stack(sums)

    def compute(self) -> dict[str, float]:
        """Return the values by name, on every rank; collective."""
        mesh, values = self._mesh, {}
        if mesh.pipeline.rank == self.last:
            own = {k: s.tolist() for k, s in self._sums.items()}, self._updates
            of_ranks, updates = zip(*gather_objects(own, mesh.data), strict=True)
            for name, metric in self._metrics.items():
                parts = [sums[name] for sums in of_ranks if name in sums]
                sums = [sum(column) for column in zip(*parts, strict=True)]
                values[name] = _with_name(name, lambda m, *s: float(m.value(*s)), metric, *sums)
            for name, metric in self._torchmetrics.items():
                _refuse_empty_lists(name, metric, updates)
                values |= _plain(name, _with_name(name, metric.compute))
        # Those of one rank: a metric may have other rounding on another, and callbacks of all ranks
        # must decide alike.
        of_world = gather_objects((mesh.pipeline.rank == self.last, values), mesh.world)
        return next(found for is_last, found in of_world if is_last)


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """Return the argument `metrics` of a Trainer as a dict.

    Raises:
        ConfigError: it is no mapping, or a name or a metric is not valid; on every rank.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise _error(
            f"metrics is a {type(metrics).__name__}: give a dict of names, such as "
            '{"top1": Accuracy()}'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
            raise _error(
                f"{name!r} cannot be the name of a metric: use letters, digits, '_', '-' and '.', "
                f"begin with a letter, and do not use {', '.join(_RESERVED)}"
            )
        wanted = "a pipemega.training.Metric, or a metric of torchmetrics"
        if isinstance(metric, type):
            raise _error(
                f"metric {name!r} is the class {metric.__name__}: write {metric.__name__}()"
            )
        if not isinstance(metric, Metric) and not _is_torchmetric(metric):
            raise _error(f"metric {name!r} is a {type(metric).__name__}: give {wanted}")
    return dict(metrics)


def _error(text: str) -> ConfigError:
    return ConfigError(text, on_every_rank=True)


def _is_torchmetric(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _reduce_over_data(metric: Any, mesh: Mesh) -> None:
    """Let a metric of torchmetrics reduce over the data axis; its default is the whole world."""
    metric.to(mesh.device)
    for module in metric.modules():  # of a collection or a wrapper, also the inner ones
        if hasattr(module, "sync_on_compute"):
            module.sync_on_compute = mesh.data.size > 1
            module.process_group = mesh.data.group


def _refuse_empty_lists(name: str, metric: Any, updates: Sequence[int]) -> None:
    """Refuse to reduce lists of torchmetrics if a data rank had no samples.

    A list without tensors takes part in no collective, so the other data ranks would wait for it.

    Args:
        updates: micro-batches of each data rank.

    Raises:
        DataError: on all these ranks.
    """
    empty = [str(rank) for rank, count in enumerate(updates) if count == 0]
    # By the defaults: every rank decides the same.
    has_lists = any(
        isinstance(default, list)
        for module in metric.modules()
        for default in getattr(module, "_defaults", {}).values()
    )
    if empty and has_lists:
        raise DataError(
            f"metric {name!r} keeps lists of all outputs, and data rank {', '.join(empty)} of "
            f"{len(updates)} has no sample of this set: give it more samples than "
            "train_micro_batch_size_per_gpu * (mesh.data - 1), or use a metric whose state has a "
            "fixed size, such as MulticlassAUROC(..., thresholds=200)"
        )


def _require_outputs(outputs: Any, names: Sequence[str]) -> None:
    """Refuse outputs without a tensor that has a dim, such as the loss itself."""
    leaves = pytree.tree_leaves(outputs)
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        found = "a scalar" if any(isinstance(leaf, Tensor) for leaf in leaves) else "no tensor"
        raise DataError(
            f"the metrics {', '.join(names)} need the outputs of the model, and no rank has them: "
            f"the last layer returns {found}. Return the outputs from the last layer, and compute "
            f"the loss in PipelineModule(loss_fn=...)"
        )


def _with_name(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a metric; its errors have the name of the metric."""
    try:
        return call(*arguments)
    except PipemegaError as error:
        raise DataError(f"metric {name!r}: {error}") from error
    except Exception as error:
        raise PipelineError(f"metric {name!r} failed: {type(error).__name__}: {error}") from error


def _plain(name: str, value: Any) -> dict[str, float]:
    """Return numbers by name; a mapping or a vector gives several, such as "f1/cat" or "f1/0"."""
    if isinstance(value, Mapping):
        parts = [_plain(f"{name}/{key}", part) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, Tensor) and value.dim():
        return {f"{name}/{index}": number for index, number in enumerate(value.flatten().tolist())}
    return {name: float(value)}
