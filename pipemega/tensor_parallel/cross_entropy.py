"""Cross entropy over logits whose vocabulary is sharded over the tensor ranks.

Each rank has local logits x; the target t is in the shard of one rank:

    local       s = softmax(x)      a = log sum exp(x)
    all-gather  [a, x_t or 0, sum of x]  of every rank
    global      A = log sum exp(a over ranks)      loss = A - x_t      dx = exp(a - A) s - [t]

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; with one collective instead of three.
"""

from typing import Any

import torch
from torch import Tensor

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import start_all_gather
from pipemega.tensor_parallel.vocabulary import (
    local_range,
    require_in_vocabulary,
    require_one_target_per_token,
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    axis: Axis,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the loss of each token: `F.cross_entropy(..., reduction="none")` of the full logits.

    Forward saves one buffer of the size of `logits`. Backward computes the gradient in place in
    this buffer, so it can run only once.

    Args:
        logits: this rank's slice of the padded vocabulary; the values of the padding are ignored.
        target: token ids; the loss and the gradient of a target `ignore_index` are 0.
        axis: the tensor axis of the mesh.
        vocab_size: size without padding.
        label_smoothing: share of the target probability that is spread evenly over the
            vocabulary without padding.
        z_loss: weight of the squared log-sum-exp of the logits, which is added to the loss.

    Shape:
        logits [..., padded vocabulary / T], target [...]  ->  [...] in fp32 (fp64 for fp64)

    Raises:
        DataError: a target is outside the vocabulary, or there are not as many as tokens.

    The loss of a token is NaN if all its logits on one rank are -inf.
    """
    require_in_vocabulary(target, vocab_size, "target", ignore_index)
    require_one_target_per_token(target, logits[..., 0].numel())
    loss: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        axis,
        local_range(vocab_size, logits.shape[-1], axis.rank),
        vocab_size,
        label_smoothing,
        z_loss,
        ignore_index,
    )
    return loss.view(target.shape)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [tokens, rows]
        target: Tensor,  # [tokens]
        axis: Axis,
        local: tuple[int, int],
        vocab_size: int,
        smoothing: float,
        z_loss: float,
        ignore_index: int,
    ) -> Tensor:
        start, stop = local
        softmax, local_lse = _local_softmax(logits, stop - start)
        is_local = (target >= start) & (target < stop)
        column = (target - start).masked_fill(~is_local, 0).unsqueeze(1)  # [tokens, 1]
        target_logit = logits.gather(1, column).squeeze(1).to(softmax.dtype)
        parts = [local_lse, target_logit.masked_fill(~is_local, 0.0)]
        if smoothing:
            parts.append(logits[:, : stop - start].sum(1, dtype=softmax.dtype))
        gathered = start_all_gather(torch.stack(parts), axis, 0)().view(axis.size, -1, len(target))
        lse = gathered[:, 0].logsumexp(0)  # [tokens]
        loss = lse - (1 - smoothing) * gathered[:, 1].sum(0)
        if smoothing:
            loss -= smoothing / vocab_size * gathered[:, 2].sum(0)
        share = (local_lse - lse).exp_()
        if z_loss:
            loss += z_loss * lse.square()
            share *= 1 + 2 * z_loss * lse
        loss = loss.masked_fill(ignored := target == ignore_index, 0.0)
        ctx.save_for_backward(softmax, share, column, is_local, ignored)
        ctx.width, ctx.smoothing, ctx.vocab_size = stop - start, smoothing, vocab_size
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        softmax, share, column, is_local, ignored = ctx.saved_tensors
        dloss = dloss.masked_fill(ignored, 0.0)
        gradient = softmax.mul_((dloss * share).unsqueeze(1))
        if ctx.smoothing:
            even = ctx.smoothing / ctx.vocab_size
            gradient[:, : ctx.width].sub_((dloss * even).unsqueeze(1))
        at_target = dloss.mul(ctx.smoothing - 1).masked_fill_(~is_local, 0.0)
        gradient.scatter_add_(1, column, at_target.unsqueeze(1))
        return gradient.to(ctx.dtype), *[None] * 7


def _local_softmax(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return softmax over the first `width` columns (0 in the others) and log-sum-exp, in fp32.

    In fp64 for fp64 logits.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tokens, rows = logits.shape
    if width == 0:
        softmax = torch.zeros(tokens, rows, dtype=dtype, device=logits.device)
        return softmax, softmax.new_full((tokens,), -torch.inf)
    if width < rows:
        logits = logits.clone()
        logits[:, width:] = -torch.inf
    softmax = torch.softmax(logits, 1, dtype=dtype)
    # log sum exp(x) = x - log softmax, taken at the largest logit, where softmax cannot underflow.
    return softmax, logits.amax(1).to(dtype) - softmax.amax(1).log_()
