"""The loss of image classifiers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.errors import DataError


class ClassificationLoss(nn.Module):
    """Cross entropy of class ids or soft labels, as the mean over the micro-batch.

    Args:
        num_classes: of the model.
        label_smoothing: share of the target probability that is spread over the classes.

    Shape:
        logits [batch, classes], labels [batch] (ids) or [batch, classes] (probabilities)  ->  []

    Raises:
        DataError: labels of another shape; on the CPU also ids outside the classes.
    """

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self._num_classes, self._label_smoothing = num_classes, label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        # In half precision the sum over the classes would lose digits.
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if labels.is_floating_point():
            self._check_shape(labels, (len(logits), self._num_classes), "soft labels")
            labels = labels.to(logits.dtype)
        else:
            self._check_shape(labels, (len(logits),), "class ids")
            self._check_ids(labels)
            labels = labels.long()
        return F.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)

    def _check_shape(self, labels: Tensor, shape: tuple[int, ...], kind: str) -> None:
        if labels.shape != shape:
            raise DataError(
                f"the {kind} of a micro-batch must have the shape {list(shape)}, and theirs is "
                f"{list(labels.shape)}: labels are class ids [batch], or probabilities [batch, "
                f"model.num_classes]"
            )

    def _check_ids(self, labels: Tensor) -> None:
        # Reading values of a GPU would wait for it; its kernel checks them itself.
        if labels.device.type != "cpu" or not len(labels):
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self._num_classes:
            wrong = low if low < 0 else high
            raise DataError(
                f"a label is class {wrong}, and the model has the classes 0 to "
                f"{self._num_classes - 1}: set model.num_classes to that of the data"
            )
