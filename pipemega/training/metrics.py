"""Metrics of an evaluation: numbers about the outputs of the last layer and their labels."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.errors import DataError
from pipemega.pipeline.microbatch_loss import Loss as LossFunction
from pipemega.pipeline.microbatch_loss import weighted_loss
from pipemega.tensor_parallel import vocab_parallel_cross_entropy
from pipemega.tensor_parallel.collectives import start_all_reduce
from pipemega.tensor_parallel.output_shard import OutputShard

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
        higher_is_better: for SaveBest and EarlyStopping; None: they need `mode`.
    """

    higher_is_better: bool | None = None

    @abstractmethod
    def sums(self, outputs: Any, labels: Any) -> Sequence[Tensor | float]:
        """Return sums over one micro-batch, always the same number of them.

        Args:
            outputs: of the last layer, whole on every tensor rank.
            labels: as the dataset gives them, on the device.
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

    Of equal logits, that of the lower class counts as larger. Labels that are -100 do not count.
    With a sharded vocabulary the tensor ranks exchange two numbers per label.

    Args:
        k: number of largest logits.
        dim: of the classes in the outputs; 1 for images with a label per pixel.

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
        """Return the number of right labels and that of all labels.

        Args:
            start, stop: the classes of `logits` on this rank; `size`: of all ranks.
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
