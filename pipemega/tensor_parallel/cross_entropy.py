"""Cross entropy over logits whose vocabulary is sharded over the tensor ranks.

Each rank has local logits x; the target t is in the shard of one rank:

    local       s = softmax(x)      a = log sum exp(x)
    all-gather  [a, x_t or 0, sum of x]  of every rank
    global      A = log sum exp(a over ranks)      loss = A - x_t      dx = exp(a - A) s - [t]

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; with one collective instead of three.

The output head and its cross entropy on one shard of the vocabulary, in three passes.

Shard r has the rows W_r of the head; x and t are hidden states and targets of tokens that count:

    S  shard      P_r = softmax(x W_rᵀ)     a_r = log sum exp     x_t, W[t] if t is local
                  A_r = P_r W_r without the row of the target
    C  last rank  a = log sum exp(a_r over shards)                p = exp(x_t - a)
                  loss = a - (1 - s) x_t - s/V sum of logits + z a²
                  dx = dloss (c sum over r of exp(a_r - a) A_r + (c p - 1 + s) W[t] - s/V sum of W)
    T  shard      dW_r = (dloss (c exp(a_r - a) P_r - s/V), with c p - 1 + s at the target)ᵀ x

with label smoothing s, z-loss z, c = 1 + 2 z a, vocabulary V. Three products of the size of the
head, and one exchange between S and C: A_r is computed before a is known. The target has a term of
its own: its probability is near 1, and the difference to 1 would be lost in half precision.

Source: Yeung et al. 2024, arXiv:2411.05288, algorithm 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import (
    local_range,
    require_in_vocabulary,
    require_one_target_per_token,
    start_all_gather,
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


# Elements of the logits that are computed at once in fp32, if the head has half precision.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class TokenObjective:
    """The loss of a token: cross entropy over a vocabulary, with its regularizations."""

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class HeadRows:
    """The rows [start, stop) of the head, without padding.

    Args:
        weight: [rows, hidden], padding included.
    """

    weight: Tensor
    start: int
    stop: int

    @property
    def rows(self) -> Tensor:
        return self.weight.detach()[: self.stop - self.start]

    def columns(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each target its local row (0 if there is none), and whether it is local."""
        is_local = (target >= self.start) & (target < self.stop)
        return (target - self.start).masked_fill(~is_local, 0), is_local


@dataclass
class Partial:
    """The result of S on one shard, in the form in which it is sent.

    Args:
        statistics: log-sum-exp, logit of the target or 0, and with label smoothing the sum of the
            logits [2 or 3, tokens], in fp32 (fp64 for an fp64 head).
        rows: A_r and W[t] or 0 [2, tokens, hidden]; None in an evaluation.
        weight_sum: sum of the rows [hidden]; None without label smoothing, or in an evaluation.
    """

    statistics: Tensor
    rows: Tensor | None = None
    weight_sum: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.statistics, self.rows, self.weight_sum) if t is not None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Partial":
        return cls(*tensors)


def partial_shapes(
    tokens: int, hidden: int, dtype: torch.dtype, loss: TokenObjective, gradient: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tensors of a `Partial`."""
    smooth = loss.label_smoothing > 0
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((2 + smooth, tokens), sum_dtype(dtype))]
    if gradient:
        shapes.append(((2, tokens, hidden), dtype))
        if smooth:
            shapes.append(((hidden,), sum_dtype(dtype)))
    return shapes


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses and statistics of a head of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Exponentials:
    """What S keeps of a micro-batch for T.

    Args:
        values: exp(logits - largest) [tokens, rows], 0 at the target.
        largest: largest logit of each token [tokens].
        target_logit: logit of the target, if it is local [tokens].
    """

    values: Tensor
    largest: Tensor
    target_logit: Tensor


def output_pass(
    head: HeadRows, x: Tensor, target: Tensor, loss: TokenObjective, gradient: bool
) -> tuple[Partial, Exponentials | None]:
    """Return the result of S, and what T needs.

    Args:
        x: [tokens, hidden].
        target: ids [tokens]; -100 has no logit.
        gradient: False in an evaluation: only statistics.
    """
    rows, tokens, wide = head.rows, len(x), sum_dtype(head.weight.dtype)
    column, is_local = head.columns(target)
    smooth = loss.label_smoothing > 0
    statistics = torch.zeros(2 + smooth, tokens, dtype=wide, device=x.device)
    largest, total = statistics.new_full((2, tokens), -torch.inf)
    kept = x.new_empty(tokens, len(rows)) if gradient else None
    for part in _chunks(tokens, len(rows)):
        logits = torch.mm(x[part], rows.t(), out=None if kept is None else kept[part]).to(wide)
        at, local = column[part, None], is_local[part]
        statistics[1, part] = logits.gather(1, at).squeeze(1).masked_fill(~local, 0.0)
        if smooth:
            statistics[2, part] = logits.sum(1)
        torch.amax(logits, 1, out=largest[part])
        values = logits.sub_(largest[part, None]).exp_()
        torch.sum(values, 1, out=total[part])
        if kept is not None:
            # Every token has a column; if its target is on another shard, the column is unchanged.
            values.scatter_(1, at, values.gather(1, at).masked_fill(local[:, None], 0.0))
            if values.data_ptr() != kept[part].data_ptr():
                kept[part] = values
    statistics[0] = largest + total.log() if len(rows) else largest
    if kept is None:
        return Partial(statistics), None
    products = x.new_zeros(2, *x.shape)
    if len(rows):
        torch.mm(kept, rows, out=products[0])
        products[0] /= total[:, None]
        products[1] = rows.index_select(0, column).masked_fill_(~is_local[:, None], 0.0)
    weight_sum = rows.sum(0, dtype=wide) if smooth else None
    return Partial(statistics, products, weight_sum), Exponentials(kept, largest, statistics[1])


@dataclass
class Combined:
    """What C computes from the results of all shards.

    Args:
        losses: loss of each token [tokens].
        normalizer: log-sum-exp over the whole vocabulary [tokens].
        target_probability: p [tokens].
    """

    losses: Tensor
    normalizer: Tensor
    target_probability: Tensor


def combine(
    parts: Sequence[Partial], target: Tensor, loss: TokenObjective, tensor: Axis
) -> Combined:
    """Return the loss of each token; 0 for a target -100.

    Args:
        parts: the results of all shards of this tensor rank.
        tensor: the tensor axis; each of its ranks has other shards.
    """
    stacked = torch.stack([part.statistics for part in parts])  # [shards, 2 or 3, tokens]
    of_rank = torch.cat([stacked[:, :1].logsumexp(0), stacked[:, 1:].sum(0)])
    gathered = start_all_gather(of_rank, tensor, 0)().view(tensor.size, *of_rank.shape)
    normalizer, sums = gathered[:, 0].logsumexp(0), gathered[:, 1:].sum(0)
    losses = normalizer - (1 - loss.label_smoothing) * sums[0]
    if loss.label_smoothing:
        losses -= loss.label_smoothing / loss.vocab_size * sums[1]
    if loss.z_loss:
        losses += loss.z_loss * normalizer.square()
    losses.masked_fill_(target == -100, 0.0)
    return Combined(losses, normalizer, (sums[0] - normalizer).exp())


def hidden_gradient(
    parts: Sequence[Partial], combined: Combined, dloss: Tensor, loss: TokenObjective
) -> Tensor:
    """Return the gradient of hidden from the shards of this tensor rank [tokens, hidden]."""
    scale = dloss * _of_normalizer(combined.normalizer, loss)
    at_target = scale * combined.target_probability - dloss * (1 - loss.label_smoothing)
    total = None
    for part in parts:
        assert part.rows is not None
        factor = scale * (part.statistics[0] - combined.normalizer).exp()
        added = part.rows[0] * factor[:, None]
        added += part.rows[1] * at_target[:, None]
        if part.weight_sum is not None:
            even = loss.label_smoothing / loss.vocab_size
            added -= (dloss * even)[:, None] * part.weight_sum
        total = added if total is None else total.add_(added)
    assert total is not None
    return total


def logit_gradient(
    head: HeadRows,
    target: Tensor,
    kept: Exponentials,
    normalizers: Tensor,
    loss: TokenObjective,
) -> Tensor:
    """Return the gradient of the local logits [tokens, rows], in the memory of `kept.values`.

    Args:
        normalizers: the normalizer and the gradient of the loss of each token [2, tokens].
    """
    normalizer, dloss = normalizers
    scale = dloss * _of_normalizer(normalizer, loss)
    factor = scale * (kept.largest - normalizer).exp()
    probability = (kept.target_logit - normalizer).exp()
    even = dloss * (loss.label_smoothing / loss.vocab_size)
    at_target = scale * probability - dloss * (1 - loss.label_smoothing) - even
    column, is_local = head.columns(target)
    for part in _chunks(*kept.values.shape):
        values = kept.values[part].to(factor.dtype)
        values.mul_(factor[part, None])
        if loss.label_smoothing:
            values.sub_(even[part, None])
        at = column[part, None]
        others = values.gather(1, at).squeeze(1)
        values.scatter_(1, at, torch.where(is_local[part], at_target[part], others)[:, None])
        if values.data_ptr() != kept.values[part].data_ptr():
            kept.values[part] = values
    return kept.values


def _of_normalizer(normalizer: Tensor, loss: TokenObjective) -> Tensor | float:
    """Return the derivative of the loss by the normalizer."""
    return 1 + 2 * loss.z_loss * normalizer if loss.z_loss else 1.0


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    """Yield slices of the tokens; none for a shard of padding alone."""
    length = max(1, _CHUNK // max(1, rows))
    for start in range(0, tokens if rows else 0, length):
        yield slice(start, min(start + length, tokens))
