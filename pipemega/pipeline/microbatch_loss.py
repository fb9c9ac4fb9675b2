"""The loss of a micro-batch: its reduction, checks of what the loss function returns, and sums.

Auxiliary losses, such as the ones that balance the tokens of experts, are no part of the loss that
is logged; layers add their gradients, multiplied by `auxiliary_factor`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemega.config import Config
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError, PipelineError
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.model.spec import LayerSpec, captured_names
from pipemega.tensor_parallel.deferred_logits import takes_deferred_logits


class WeightedLoss(NamedTuple):
    """A weighted sum of losses and its weight; a `loss_fn` returns it to average over weights.

        def loss_fn(logits, labels):
            losses = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            return pipemega.WeightedLoss(losses, (labels != -100).sum())

    With `training.loss_reduction: "token"` the loss of a step is the sum of all sums divided by the
    sum of all weights, over the micro-batches of all data ranks.

    Args:
        sum: scalar tensor with a gradient: the sum of the losses, such as the losses of tokens.
        weight: their number or total weight: a scalar tensor or a number.
    """

    sum: Tensor
    weight: Tensor | float


Loss = Callable[[Any, Any], Tensor | WeightedLoss | tuple[Tensor, Tensor | int]]
"""(output, labels) -> the mean loss of the micro-batch, or its (weighted sum, weight)."""


def weighted_loss(result: Any) -> WeightedLoss:
    """Return what a `loss_fn` returned as a WeightedLoss; a mean loss has weight 1.

    Raises:
        PipelineError: it is neither a scalar, nor a WeightedLoss, nor a pair (sum, integer).
    """
    if isinstance(result, tuple) and not isinstance(result, WeightedLoss):
        if len(result) != 2 or not _is_count(result[1]):
            raise PipelineError(
                f"loss_fn returned ({', '.join(map(_kind, result))}), which does not say whether "
                f"its parts are weights: return the mean loss alone; or, to average over tokens, "
                f"pipemega.WeightedLoss(sum, weight) or a pair (sum, integer count). Only the loss "
                f"is used: other values cannot be returned"
            )
        result = WeightedLoss(*result)
    loss, weight = result if isinstance(result, WeightedLoss) else (result, 1)
    for name, value in (("loss", loss), ("weight", weight)):
        is_number = name == "weight" and isinstance(value, int | float)
        if not is_number and (not isinstance(value, Tensor) or value.numel() != 1):
            raise PipelineError(
                f"loss_fn must return a scalar tensor, the mean loss, or "
                f"pipemega.WeightedLoss(sum, weight), but its {name} is {_kind(value)}: "
                f"reduce it, for example with .mean()"
            )
    return WeightedLoss(loss, weight)


# Of the run in progress. Not local to a thread: on a GPU, autograd has threads of its own.
_auxiliary: tuple[float, Callable[[], float]] = (1.0, partial(float, 1))


def set_auxiliary_factor(loss_factor: float, weight_per_sample: Callable[[], float]) -> None:
    """Set what `auxiliary_factor` returns, at the start of each run of a plan.

    Args:
        loss_factor, weight_per_sample: see `MicroBatches`.
    """
    global _auxiliary
    _auxiliary = loss_factor, weight_per_sample


def auxiliary_factor() -> float:
    """Return the gradient with which backward starts at a sum over samples of an auxiliary loss.

    With it, the gradient of a step is the gradient of the mean over the samples of the step. It
    contains the loss scale, and is the same on all ranks.
    """
    loss_factor, weight_per_sample = _auxiliary
    return loss_factor * weight_per_sample()


class LossSums:
    """The losses of the micro-batches of a run on the rank of the last stage, and their weights.

    Scalars on `device`; the weight of a mean loss is 1. Empty on the other ranks.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, microbatch: int, loss: Tensor, weight: Tensor) -> None:
        """Add the (weighted) loss of a micro-batch; several losses of one are one sum."""
        loss, weight = loss.detach().reshape(()), weight.detach().reshape(())
        if microbatch in self._parts:
            loss = self._parts[microbatch][0] + loss
        self._parts[microbatch] = loss, weight
        self.device = loss.device

    def __len__(self) -> int:
        return len(self._parts)

    def of(self, microbatch: int) -> Tensor | None:
        """Return the loss of a micro-batch; None if it is not known."""
        part = self._parts.get(microbatch)
        return None if part is None else part[0]

    def totals(self, mesh: Mesh) -> tuple[Tensor | float, Tensor | float, int]:
        """Return the sums of losses and weights, and the number of micro-batches.

        Zeros except on the first tensor rank of the last stage, so that sums over all ranks count
        each micro-batch once.
        """
        if not self._parts or mesh.tensor.rank > 0:
            return 0.0, 0.0, 0
        # In the order of micro-batches: every schedule gives the same sum.
        parts = [self._parts[m] for m in sorted(self._parts)]
        losses = torch.stack([loss.double() for loss, _ in parts]).sum()
        weights = torch.stack([weight.double() for _, weight in parts]).sum()
        return losses, weights, len(parts)


def mean_over_ranks(loss: Tensor | float, weight: Tensor | float, mesh: Mesh) -> float:
    """Return the loss summed over all ranks, divided by the weight; collective."""
    sums = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in (loss, weight)])
    sums = sums.to(mesh.device)
    if mesh.world.size > 1:
        all_reduce(sums, mesh.world)
    synchronize()
    loss_sum, weight_sum = sums.tolist()
    return loss_sum / weight_sum if weight_sum else float("nan")


def reduced_loss(config: Config, loss_fn: Loss | None) -> Loss | None:
    """Return `loss_fn` with the reduction of training.loss_reduction.

    "token": micro-batches are averaged by their weights. "micro_batch": all have weight 1.
    """
    if loss_fn is None or config.training.loss_reduction == "token":
        return loss_fn

    def mean(output: Any, labels: Any) -> Tensor:
        total, weight = weighted_loss(loss_fn(output, labels))
        if not isinstance(weight, Tensor):
            return total / weight if weight > 0 else total
        # A micro-batch in which no token counts has loss 0, not nan.
        return total / torch.where(weight > 0, weight, torch.ones_like(weight))

    vars(mean).update(takes_deferred_logits=takes_deferred_logits(loss_fn))
    return mean


def microbatch_loss(
    loss_fn: Loss, output: Any, labels: Any, share: float, train: bool
) -> tuple[Tensor, Tensor]:
    """Return (weighted loss, weight) of one micro-batch.

    Args:
        share: its samples, relative to a full micro-batch: the weight of a mean loss. A
            WeightedLoss has its own weight. With 0 the loss is 0, and so are its gradients:
            `loss_fn` is not called, because a mean over no labels is nan.
        train: the loss must have a gradient.

    Raises:
        PipelineError: loss_fn failed, returned something else (see `weighted_loss`), or returned a
            loss without a gradient.
    """
    if share == 0:
        return _no_loss(output)
    try:
        result = loss_fn(output, labels)
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(f"loss_fn failed: {type(error).__name__}: {error}") from error
    loss, weight = weighted_loss(result)
    if share != 1 and not isinstance(result, tuple):
        loss, weight = loss * share, weight * share
    if train and not loss.requires_grad:
        raise PipelineError(
            "the loss has no gradient: it was computed under no_grad, detached or rounded, or "
            "the model has no trainable parameter"
        )
    if not isinstance(weight, Tensor):
        weight = torch.full((), weight, device=loss.device)
    return loss, weight


def _no_loss(output: Any) -> tuple[Tensor, Tensor]:
    """Return loss 0 and weight 0; the gradients of the outputs are 0, whatever their values are."""
    tensors = tensors_of(output)
    parts = [tensor.reshape(-1)[:0].sum() for tensor in tensors if tensor.requires_grad]
    loss = torch.stack([part.float() for part in parts]).sum() if parts else torch.zeros(())
    return loss, torch.zeros((), device=loss.device)


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        integer = not (value.is_floating_point() or value.is_complex())
        return integer and value.dtype != torch.bool
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """Return dtype and shape of a tensor, the type of anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def check_loss(loss: Any) -> None:
    """Refuse a loss_fn that cannot be called, or whose parameters would not be trained."""
    if isinstance(loss, type):
        raise ConfigError(
            f"loss_fn is the class {loss.__name__}: write loss_fn={loss.__name__}(), or "
            f"LayerSpec({loss.__name__}, ...)",
            on_every_rank=True,
        )
    if loss is None or isinstance(loss, LayerSpec):
        return
    if not callable(loss):
        raise ConfigError(
            f"loss_fn is {loss!r}, which cannot be called: give a function of (output, labels), "
            f"such as torch.nn.functional.cross_entropy, a module or a LayerSpec",
            on_every_rank=True,
        )
    captured = captured_names(loss)
    if captured:
        raise ConfigError(
            f"loss_fn has trainable parameters ({', '.join(captured.values())}), which no stage "
            f"would train: move them to a last layer in the list",
            on_every_rank=True,
        )
