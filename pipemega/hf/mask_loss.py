"""The loss of SAM, which transformers does not have."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.errors import DataError
from pipemega.pipeline.microbatch_loss import WeightedLoss

# Weight of the focal loss, beside the dice loss and the error of the predicted overlap.
_FOCAL = 20.0
_GAMMA, _ALPHA = 2.0, 0.25


def mask_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> WeightedLoss:
    """Return 20 x focal loss + dice loss of the best mask + squared error of the predicted overlap.

    A prompt has several masks; only the one with the smallest focal and dice loss is trained, and
    the overlap (intersection over union) is predicted for each. Logits of another size than the
    labels are interpolated.

    Shape:
        output: pred_masks [batch, prompts, masks, h, w], iou_scores [batch, prompts, masks]
        labels: [batch, prompts, height, width], 0 or 1
        ->  WeightedLoss: the sum over prompts, and their number

    Raises:
        DataError: the labels have another shape.

    Source: Kirillov et al. 2023, arXiv:2304.02643, appendix A.
    """
    logits, scores = output
    if labels.dim() != 4 or labels.shape[:2] != logits.shape[:2]:
        raise DataError(
            f"labels of masks have shape [batch, prompts, height, width] = "
            f"[{logits.shape[0]}, {logits.shape[1]}, ...], not {list(labels.shape)}"
        )
    if logits.shape[-2:] != labels.shape[-2:]:
        prompts = logits.flatten(0, 1)
        prompts = F.interpolate(prompts, size=labels.shape[-2:], mode="bilinear")
        logits = prompts.reshape(*labels.shape[:2], *prompts.shape[1:])
    targets = labels.unsqueeze(2).to(logits.dtype).expand_as(logits)
    per_mask = _FOCAL * _focal(logits, targets) + _dice(logits, targets)
    with torch.no_grad():
        inside, wanted = logits > 0, targets > 0.5
        union = (inside | wanted).sum((-2, -1)).clamp(min=1)
        overlap = (inside & wanted).sum((-2, -1)) / union
    errors = (scores - overlap.to(scores.dtype)).square().mean(-1)
    losses = per_mask.min(-1).values + errors
    return WeightedLoss(losses.sum(), losses.numel())


def _focal(logits: Tensor, targets: Tensor) -> Tensor:
    """Source: Lin et al. 2017, arXiv:1708.02002."""
    entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    # entropy is -log of the probability of the target.
    missing = 1 - torch.exp(-entropy)
    weight = _ALPHA * targets + (1 - _ALPHA) * (1 - targets)
    return (weight * missing**_GAMMA * entropy).mean((-2, -1))


def _dice(logits: Tensor, targets: Tensor) -> Tensor:
    """Source: Milletari et al. 2016, arXiv:1606.04797; with 1 added, for empty masks."""
    inside = logits.sigmoid()
    common = (inside * targets).sum((-2, -1))
    total = inside.sum((-2, -1)) + targets.sum((-2, -1))
    return 1 - (2 * common + 1) / (total + 1)
