"""Head and cross entropy as one operation: the logits of all tokens are never in memory.

    forward     chunk by chunk: logits, loss, dlogits, dx and dW, of the tokens that count
    backward    dx and dW times the gradient of the loss

Three matrix products, as with logits. dW is as large as W, and many micro-batches may be between
their forward and their backward (gpipe). So only one of them keeps its dW; the others keep their
input, and compute logits and gradients in backward, with a fourth product and the same result.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import (
    local_range,
    require_in_vocabulary,
    require_one_target_per_token,
    start_all_gather,
)
from pipemega.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pipemega.tensor_parallel.deferred_logits import (
    DeferredLogits,
    GradientSink,
    HeadGradients,
    HeadShard,
    gradients,
    losses_and_gradients,
)

IGNORE_INDEX = -100

# Weight -> reference to the one dW that waits for its backward.
_pending = WeakTensorKeyDictionary()


def linear_cross_entropy(
    output: DeferredLogits,
    target: Tensor,
    *,
    factor: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return `factor` times the sum of the losses of the tokens whose target is not -100.

    Tokens with the target -100 are not projected, unless the target is on a GPU and the host does
    not know their number (`output.counted`). The backward of the result can run once.

    Args:
        target: token ids, or -100.
        factor: factor of the loss, such as 1 / sequence length.
        label_smoothing, z_loss: see `HeadShard`.

    Shape:
        output.hidden [..., dim], target [...]  ->  scalar in fp32 (fp64 for a head in fp64)

    Raises:
        DataError: a target is outside the vocabulary, or there are not as many as tokens.
    """
    require_in_vocabulary(target, output.vocab_size, "target", IGNORE_INDEX)
    hidden, weight = output.hidden.reshape(-1, output.hidden.shape[-1]), output.weight
    require_one_target_per_token(target, len(hidden))
    trains = torch.is_grad_enabled()
    sink = output.sink
    if not (trains and weight.requires_grad) or weight._backward_hooks:
        sink = None  # a user's hook on the weight must see its gradient
    call = _Call(output, factor, label_smoothing, z_loss, trains, sink)
    flat = target.reshape(-1)
    rows, ignored = counted_rows(flat, output.counted)
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight if sink is None else weight.detach(),
        output.bias,
        # Makes the result require a gradient, even if neither hidden nor a bias does.
        None if sink is None else torch.zeros((), requires_grad=True),
        flat,
        rows,
        ignored,
        call,
    )
    return result


def cross_entropy_sum(
    output: Tensor | DeferredLogits,
    target: Tensor,
    *,
    axis: Axis,
    vocab_size: int,
    factor: float,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return `factor` times the sum of the losses, from logits or without computing all of them.

    For the arguments see `vocab_parallel_cross_entropy` and `linear_cross_entropy`.
    """
    if isinstance(output, DeferredLogits):
        return linear_cross_entropy(
            output, target, factor=factor, label_smoothing=label_smoothing, z_loss=z_loss
        )
    losses = vocab_parallel_cross_entropy(
        output,
        target,
        axis=axis,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return losses.sum() * factor


def pending_bytes(weight: Tensor) -> int:
    """Return the bytes of the gradient of a head that waits for its backward."""
    waiting = _waiting(weight)
    return 0 if waiting is None else waiting.nbytes


def _waiting(weight: Tensor) -> Tensor | None:
    reference = _pending.get(weight)  # type: ignore[no-untyped-call]
    waiting: Tensor | None = None if reference is None else reference()
    return waiting


def count_labels(labels: Any) -> int | None:
    """Return the number of labels that are not -100; None: they are no tensor in host memory."""
    if not isinstance(labels, Tensor) or labels.device.type != "cpu":
        return None
    return int((labels != IGNORE_INDEX).sum())


def counted_rows(target: Tensor, counted: int | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the targets [tokens] that are not -100, or which targets are -100.

    At most one of them; neither of them if all targets count. On a GPU the host does not wait.

    Args:
        counted: their number, from `count_labels`; used on a GPU. None: not known.
    """
    if target.device.type == "cpu":
        rows = (target != IGNORE_INDEX).nonzero().squeeze(1)
        return None if len(rows) == len(target) else rows, None
    if counted is None:
        return None, target == IGNORE_INDEX
    counts = target != IGNORE_INDEX
    if not target.is_meta:
        torch._assert_async(counts.sum() == counted, "the loss has other labels than the batch")
    if counted == len(target):
        return None, None
    return torch.nonzero_static(counts, size=counted).squeeze(1), None


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that are no inputs of its autograd node.

    Args:
        trains: gradients are enabled.
        sink: takes the weight gradient; None: autograd, or it is not needed.
    """

    output: DeferredLogits
    factor: float
    label_smoothing: float
    z_loss: float
    trains: bool
    sink: GradientSink | None

    def head(self, weight: Tensor, bias: Tensor | None) -> HeadShard:
        axis, size = self.output.axis, self.output.vocab_size
        start, stop = local_range(size, weight.shape[0], axis.rank)
        return HeadShard(weight, start, stop, size, bias, self.label_smoothing, self.z_loss)

    @property
    def expected(self) -> float:
        """The gradient of the result for which gradients are computed."""
        return self.output.expected_gradient or 1.0

    def needed(self, ctx: Any) -> tuple[bool, bool, bool]:
        """Return whether the gradients of hidden, weight and bias are needed."""
        hidden, weight, bias = ctx.needs_input_grad[:3]
        if not self.trains:
            return False, False, False
        return hidden, weight or self.sink is not None, bias


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [tokens, dim]
        weight: Tensor,  # [rows, dim]
        bias: Tensor | None,
        anchor: Tensor | None,
        target: Tensor,  # [tokens]
        rows: Tensor | None,
        ignored: Tensor | None,
        call: _Call,
    ) -> Tensor:
        head, needed = call.head(weight, bias), call.needed(ctx)
        x, target = (hidden, target) if rows is None else (hidden[rows], target[rows])
        into = None
        if any(needed) and not (needed[1] and _waiting(call.output.weight) is not None):
            into = HeadGradients.of(head, x, *needed)
            if into.weight is not None:
                _pending[call.output.weight] = weakref.ref(into.weight)
        elif any(needed):
            ctx.save_for_backward(x, target, weight, bias)
        exchange = partial(_gathered, axis=call.output.axis)
        scale = call.factor * call.expected
        losses, lse = losses_and_gradients(head, x, target, exchange, into, scale, ignored)
        if ignored is not None:
            losses = losses.masked_fill_(ignored, 0.0)
        ctx.call, ctx.rows, ctx.into, ctx.ignored = call, rows, into, ignored
        ctx.tokens, ctx.lse = len(hidden), lse if into is None else None
        return losses.sum() * call.factor

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        into, ctx.into = ctx.into, None
        if into is None:
            x, target, weight, bias = ctx.saved_tensors
            head = call.head(weight, bias)
            into = HeadGradients.of(head, x, *call.needed(ctx))
            scale = call.factor * call.expected
            gradients(head, x, target, ctx.lse, into, scale, ctx.ignored)
        ratio = dloss / call.expected
        dx, dw, db = (None if g is None else g.mul_(ratio) for g in vars(into).values())
        if dx is not None and ctx.rows is not None:
            dx = dx.new_zeros(ctx.tokens, dx.shape[1]).index_copy_(0, ctx.rows, dx)
        weight = call.output.weight
        dw = None if dw is None else dw.to(weight.dtype)
        if call.sink is not None and dw is not None:
            call.sink.add_at_once(weight, dw)
            dw = None
        return dx, dw, None if db is None else db.to(weight.dtype), *[None] * 5


def _gathered(parts: Tensor, axis: Axis) -> Tensor:
    """Return the statistics of all tensor ranks: [ranks, parts, tokens]."""
    return start_all_gather(parts, axis, 0)().view(axis.size, *parts.shape)
