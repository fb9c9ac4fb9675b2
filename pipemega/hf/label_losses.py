"""Losses of the tasks, over logits of this rank's slice of the vocabulary."""

from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.tensor_parallel import DeferredLogits, cross_entropy_sum


class TokenLoss(nn.Module):
    """Cross entropy of tokens; labels stand at the position that predicts them, -100 is ignored.

    transformers shifts the labels of causal models in the model; here the data do it.

    Shape:
        logits [batch, sequence, padded vocabulary / T], labels [batch, sequence]
        ->  WeightedLoss: the sum over tokens and their number, both divided by the sequence length,
        so that they fit fp16
    """

    takes_deferred_logits = True

    def __init__(self, vocab_size: int, axis: Axis) -> None:
        super().__init__()
        self._vocab_size, self._axis = vocab_size, axis

    def forward(self, logits: Tensor | DeferredLogits, labels: Tensor) -> WeightedLoss:
        length = labels.shape[-1]
        total = cross_entropy_sum(
            logits, labels, axis=self._axis, vocab_size=self._vocab_size, factor=1 / length
        )
        return WeightedLoss(total, (labels != -100).sum().to(total.dtype) / length)


def class_loss(logits: Tensor, labels: Tensor) -> WeightedLoss:
    """Cross entropy of classes; -100 is ignored.

    Shape:
        logits [batch, classes] or [batch, sequence, classes], labels without the last dim
    """
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return WeightedLoss(loss, (labels != -100).sum().to(loss.dtype))
