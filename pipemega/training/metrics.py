"""Metrics of an evaluation: numbers about the outputs of the last layer and their labels.

MetricSet: the metrics of one evaluation, over micro-batches, data ranks and stages.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import ConfigError, DataError, PipelineError, PipemegaError
from pipemega.pipeline.microbatch_loss import Loss as LossFunction
from pipemega.pipeline.microbatch_loss import weighted_loss
from pipemega.tensor_parallel import vocab_parallel_cross_entropy
from pipemega.tensor_parallel.collectives import start_all_reduce
from pipemega.tensor_parallel.deferred_logits import OutputShard

Mode = Literal["min", "max"]
"""Which values are better."""

IGNORED = -100
"""Label that does not count, as in torch's cross entropy."""


class Metric(ABC):
    """A number that is computed from sums over all micro-batches and data ranks.

        class ExactMatch(Metric):
            higher_is_better = True

            def sums(self, outputs, labels):
                right = (outputs.argmax(-1) == labels).all(-1)
                return right.sum(), right.numel()

    The sums are computed on the ranks of the last stage, added over micro-batches and data ranks in
    fp64, and every rank gets the value.

    Attributes:
        higher_is_better: which values SaveBest and EarlyStopping prefer; None: they need `mode`.
    """

    higher_is_better: bool | None = None

    @abstractmethod
    def sums(self, outputs: Any, labels: Any) -> Sequence[Tensor | float]:
        """Return sums over one micro-batch, always the same number of them.

        Args:
            outputs: outputs of the last layer, whole on every tensor rank.
            labels: the labels as the dataset gives them, on the device.
        """

    def value(self, *sums: float) -> float:
        """Return the metric; by default the first sum divided by the second one."""
        total, count = sums
        return total / count if count else math.nan

    def sums_of_shards(
        self, outputs: Any, labels: Any, shard: OutputShard
    ) -> Sequence[Tensor | float]:
        """Return `sums` if each tensor rank has a slice of the outputs; collective over them.

        By default the outputs are gathered.
        """
        return self.sums(shard.gather(outputs), labels)


class Loss(Metric):
    """The mean of a loss function over all samples.

    Args:
        loss_fn: maps (outputs, labels) to the mean over the samples of a micro-batch, or to a
            `WeightedLoss`. None: cross entropy of class indices, without label smoothing.
    """

    higher_is_better = False

    def __init__(self, loss_fn: LossFunction | None = None) -> None:
        self._loss_fn = loss_fn

    def sums(self, outputs: Any, labels: Any) -> Sequence[Tensor | float]:
        if self._loss_fn is None:
            logits = _logits(outputs, labels, -1, type(self).__name__).double()
            rows, targets = logits.flatten(0, -2), labels.flatten()
            loss = F.cross_entropy(rows, targets, reduction="sum", ignore_index=IGNORED)
            return loss, (labels != IGNORED).sum()
        result = self._loss_fn(outputs, labels)
        loss, weight = weighted_loss(result)
        if result is loss:  # the mean over the samples
            samples = len(_first_tensor(labels))
            return loss.double() * samples, samples
        return loss, weight

    def sums_of_shards(
        self, outputs: Any, labels: Any, shard: OutputShard
    ) -> Sequence[Tensor | float]:
        if self._loss_fn is not None:
            return super().sums_of_shards(outputs, labels, shard)
        logits = _logits(outputs, labels, -1, type(self).__name__)
        losses = vocab_parallel_cross_entropy(
            logits, labels, axis=shard.axis, vocab_size=shard.size, ignore_index=IGNORED
        )
        return losses.double().sum(), (labels != IGNORED).sum()


class Perplexity(Loss):
    """exp of the mean cross entropy of all tokens; inf if that overflows a float."""

    def __init__(self) -> None:
        super().__init__()

    def value(self, *sums: float) -> float:
        try:
            return math.exp(super().value(*sums))
        except OverflowError:
            return math.inf


class Accuracy(Metric):
    """Share of the labels that are among the `k` largest logits, 0 to 1.

    If two logits are equal, the class with the lower index is ranked first. Labels that are -100 do
    not count. With a sharded vocabulary the tensor ranks exchange two numbers per label.

    Args:
        k: number of largest logits.
        dim: dimension of the classes in the outputs; 1 for images with a label per pixel.

    Shape:
        outputs [..., classes], labels [...]: class indices
    """

    higher_is_better = True

    def __init__(self, k: int = 1, *, dim: int = -1) -> None:
        self._k, self._dim = k, dim

    def sums(self, outputs: Any, labels: Any) -> Sequence[Tensor | float]:
        logits = _logits(outputs, labels, self._dim, f"Accuracy(k={self._k})")
        return self._count(logits, labels, 0, logits.shape[-1], logits.shape[-1], None)

    def sums_of_shards(
        self, outputs: Any, labels: Any, shard: OutputShard
    ) -> Sequence[Tensor | float]:
        logits = _logits(outputs, labels, -1, f"Accuracy(k={self._k})")
        start, stop = shard.local_range(logits)
        return self._count(logits, labels, start, stop, shard.size, shard)

    def _count(
        self,
        logits: Tensor,
        labels: Tensor,
        start: int,
        stop: int,
        size: int,
        shard: OutputShard | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the number of right labels and the number of all labels.

        Args:
            start, stop: the classes of `logits` on this rank.
            size: number of classes of all ranks.
        """
        if self._k > size:
            raise DataError(
                f"Accuracy(k={self._k}): the outputs have {size} classes: choose k up to {size}"
            )
        is_local = (labels >= start) & (labels < stop)
        at = (labels - start).masked_fill(~is_local, 0).unsqueeze(-1)
        label_logit = logits.gather(-1, at).squeeze(-1).double().masked_fill(~is_local, 0.0)
        # A label outside of all classes is wrong.
        label_logit, exists = _summed(torch.stack([label_logit, is_local.double()]), shard)
        values, threshold = logits[..., : stop - start].double(), label_logit.unsqueeze(-1)
        classes = torch.arange(start, stop, device=logits.device)
        # Not "greater": nan is larger than each number, as in torch.topk.
        larger = ~(values <= threshold)
        larger |= (values == threshold) & (classes < labels.unsqueeze(-1))
        (position,) = _summed(larger.sum(-1).unsqueeze(0), shard)
        counted = labels != IGNORED
        right = (position < self._k) & (exists > 0) & counted
        return right.sum(), counted.sum()


class MixupAccuracy(Metric):
    """The share that the label gives to the class with the largest logit, 0 to 1.

    Of images that are mixed from two (`data.transforms.mixup`): the accuracy for each of the two
    classes, weighted by their shares. Labels may also be class indices.

    Shape:
        outputs [..., classes], labels float [..., classes] or class indices [...]
    """

    higher_is_better = True

    def sums(self, outputs: Any, labels: Any) -> Sequence[Tensor | float]:
        if not isinstance(labels, Tensor) or not labels.is_floating_point():
            return Accuracy().sums(outputs, labels)
        if not isinstance(outputs, Tensor) or outputs.shape != labels.shape:
            got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise DataError(
                f"MixupAccuracy takes logits and shares of the same shape [..., classes], and got "
                f"outputs {got} with labels {list(labels.shape)}"
            )
        shares = labels.double().gather(-1, outputs.argmax(-1, keepdim=True))
        return shares.sum(), shares.numel()


def _summed(x: Tensor, shard: OutputShard | None) -> Tensor:
    return x if shard is None else start_all_reduce(x.contiguous(), shard.axis)()


def _logits(outputs: Any, labels: Any, dim: int, name: str) -> Tensor:
    """Return the logits with the classes in the last dim.

    Raises:
        DataError: outputs are no tensor, or labels are no class indices of the same shape.
    """
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
        kinds = f"{type(outputs).__name__} and {type(labels).__name__}"
        raise DataError(
            f"{name} takes a tensor of logits and a tensor of labels, and the last layer and the "
            f"data give {kinds}: write a Metric whose sums(outputs, labels) selects the tensors"
        )
    logits = outputs.movedim(dim, -1) if outputs.dim() else outputs
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape or not outputs.dim():
        raise DataError(
            f"{name} takes logits [..., classes] and class indices [...], and got outputs "
            f"{list(outputs.shape)} with labels {list(labels.shape)} of {labels.dtype}: use "
            f"Accuracy(dim=1) for outputs [batch, classes, ...], or write a Metric of your own"
        )
    return logits


def _first_tensor(tree: Any) -> Tensor:
    tensor = next((leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), None)
    if tensor is None or not tensor.dim():
        raise DataError(
            "Loss(loss_fn) weights a micro-batch by its samples, and the labels have no tensor "
            "with a dim: return a WeightedLoss(sum, weight)"
        )
    return tensor


T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z][\w.-]*")
# Fields of the record of an evaluation.
_RESERVED = ("kind", "split", "step", "consumed_samples", "loss", "seconds")


class MetricSet:
    """Adds up metrics on the ranks of the last stage, and gives their values to all ranks.

    Args:
        metrics: the metrics by name: each is a `Metric`, or a metric or MetricCollection of
            torchmetrics.
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
    for module in metric.modules():  # also the inner metrics of a collection or a wrapper
        if hasattr(module, "sync_on_compute"):
            module.sync_on_compute = mesh.data.size > 1
            module.process_group = mesh.data.group


def _refuse_empty_lists(name: str, metric: Any, updates: Sequence[int]) -> None:
    """Refuse to reduce lists of torchmetrics if a data rank had no samples.

    A list without tensors takes part in no collective, so the other data ranks would wait for it.

    Args:
        updates: micro-batches of each data rank.

    Raises:
        DataError: a data rank has no sample, and the metric keeps lists; on every data rank.
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
