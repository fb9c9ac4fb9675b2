"""Logits that are not computed: a fused loss takes the input of the head and the head itself.

with defer_logits(loss_fn, head): the executor, if only the loss needs the logits
    output = head(hidden)         DeferredLogits(hidden, weight, ...)
loss = loss_fn(output, labels)    computes logits and gradients, a chunk at a time

Cross entropy of a linear head, computed for a chunk of tokens at a time and without autograd.

    chunk of x    logits = x Wᵀ    statistics    exchange    dlogits    dx = dlogits W
                                                                        dW += dlogitsᵀ x

The logits of all tokens are never in memory. Those of a chunk are in one buffer, in which they
become their exponentials and then their gradients. Each rank has some rows of W:

    statistics   local log sum exp a, target logit or 0, sum of the logits (with label smoothing)
    all ranks    A = log sum exp(a over ranks)    p = exp(x - A)
    loss         A - (1 - s) x_t - s / V sum(x) + z A²       s: smoothing, z: weight of the z-loss
    dlogits      (1 + 2 z A) p - (1 - s) [t] - s / V

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (sharded vocabulary); Chowdhery et al.
2022, arXiv:2204.02311, section 5 (z-loss); Hsu et al. 2024, arXiv:2410.10989, section 3.2
(gradients in the forward, by chunks).

OutputShard: declares that the output of a layer is a slice of the whole output.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
)
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import gather_from_tensor, local_range

Exchange = Callable[[Tensor], Tensor]
"""Statistics of this rank [parts, tokens] -> of all ranks [ranks, parts, tokens]."""

# The logits of a chunk take as many bytes as W, within these numbers of tokens: with fewer, the
# sums of dW would be slower than the products.
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1024


@dataclass(frozen=True)
class HeadShard:
    """The rows of a head that this rank has, and the loss.

    Args:
        weight: [rows, dim]; rows after the first `stop - start` are padding.
        start, stop: ids of the rows.
        vocab_size: size of the vocabulary of all ranks, without padding.
        bias: [rows].
        label_smoothing: share of the target probability that is spread over the vocabulary.
        z_loss: weight of the squared log-sum-exp in the loss of a token.
    """

    weight: Tensor
    start: int
    stop: int
    vocab_size: int
    bias: Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def width(self) -> int:
        """The number of rows without padding."""
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of losses and statistics: fp64 for a head in fp64, else fp32."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32


@dataclass
class HeadGradients:
    """Gradients of the sum of the losses, times a scale; None: not needed.

    Args:
        hidden: [tokens, dim], from this rank's rows alone, to be summed over the ranks.
        weight: [rows, dim], to which is added; fp32 if the head is in half precision.
        bias: [rows], to which is added.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, head: HeadShard, hidden: Tensor, need_hidden: bool, need_weight: bool, need_bias: bool
    ) -> "HeadGradients":
        """Return the tensors that `gradients` fills, zero where it adds."""
        weight, bias = (
            torch.zeros_like(like, dtype=head.dtype) if needed and like is not None else None
            for needed, like in ((need_weight, head.weight), (need_bias, head.bias))
        )
        return cls(torch.zeros_like(hidden) if need_hidden else None, weight, bias)


def statistics(head: HeadShard, hidden: Tensor, target: Tensor) -> Tensor:
    """Return what the loss needs of this rank's logits: [parts, tokens]; see `combine`.

    Shape:
        hidden [tokens, dim], target [tokens]: ids of the whole vocabulary
    """
    run = _Run(head, hidden, target)
    parts = [run.statistics(chunk)[0] for chunk in run.chunks()]
    return torch.cat(parts, 1) if parts else run.no_statistics(0)


def combine(head: HeadShard, gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Return (losses, log-sum-exp) of the tokens, from the statistics of all ranks.

    Shape:
        gathered [ranks, parts, tokens]  ->  [tokens], [tokens]
    """
    lse = gathered[:, 0].logsumexp(0) if len(gathered) > 1 else gathered[0, 0]
    loss = lse - (1 - head.label_smoothing) * gathered[:, 1].sum(0)
    if head.label_smoothing:
        loss = loss - head.label_smoothing / head.vocab_size * gathered[:, 2].sum(0)
    if head.z_loss:
        loss = loss + head.z_loss * lse.square()
    return loss, lse


def gradients(
    head: HeadShard,
    hidden: Tensor,
    target: Tensor,
    lse: Tensor,
    into: HeadGradients,
    scale: float = 1.0,
    ignored: Tensor | None = None,
) -> None:
    """Compute the logits again, and from them the gradients of `scale` times the sum of the losses.

    Args:
        lse: log-sum-exp from `combine` [tokens].
        into: takes the gradients; `hidden` is overwritten, and the others are added to.
        ignored: see `losses_and_gradients`.
    """
    run = _Run(head, hidden, target, ignored)
    for chunk in run.chunks():
        _, largest = run.statistics(chunk)
        run.add_gradients(chunk, largest, lse[chunk], into, scale)


def losses_and_gradients(
    head: HeadShard,
    hidden: Tensor,
    target: Tensor,
    exchange: Exchange,
    into: HeadGradients | None,
    scale: float = 1.0,
    ignored: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (losses, log-sum-exp) of the tokens; also compute the gradients if `into` is given.

    Needs three matrix products; `statistics` and then `gradients` need four. Gradients are bitwise
    equal to the gradients from `gradients`.

    Args:
        exchange: called once per chunk; collective.
        ignored: [tokens], bool: tokens whose gradient is zero, whatever their target and their loss
            are. It is better to leave them out, if the host knows their number.
    """
    run = _Run(head, hidden, target, ignored)
    losses, lses = [hidden.new_zeros(0, dtype=head.dtype)], [hidden.new_zeros(0, dtype=head.dtype)]
    for chunk in run.chunks():
        parts, largest = run.statistics(chunk)
        loss, lse = combine(head, exchange(parts))
        losses.append(loss)
        lses.append(lse)
        if into is not None:
            run.add_gradients(chunk, largest, lse, into, scale)
    return torch.cat(losses), torch.cat(lses)


def chunk_length(head: HeadShard, tokens: int) -> int:
    """Return the tokens of a chunk: all chunks but the last have this length."""
    most = head.weight.shape[1] * head.weight.element_size() // head.dtype.itemsize
    most = min(max(most, _FEWEST_TOKENS), _MOST_TOKENS)
    return max(1, -(-tokens // max(1, -(-tokens // most))))


class _Run:
    """One pass over the tokens, with the buffers of a chunk."""

    def __init__(
        self, head: HeadShard, hidden: Tensor, target: Tensor, ignored: Tensor | None = None
    ) -> None:
        self._head, self._hidden, self._target = head, hidden, target
        self._ignored = ignored
        self._weight = head.weight.detach()[: head.width]
        self._length = chunk_length(head, len(hidden))
        shape = (min(self._length, len(hidden)), head.width)
        # Logits in the statistics' dtype; in half precision also the product and its gradient.
        self._values = hidden.new_empty(shape, dtype=head.dtype)
        self._products = self._values
        if hidden.dtype != head.dtype:
            self._products = hidden.new_empty(shape)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self._hidden), self._length):
            yield slice(start, min(start + self._length, len(self._hidden)))

    def no_statistics(self, tokens: int) -> Tensor:
        """Return the statistics of a rank without rows."""
        parts = self._values.new_zeros(3 if self._head.label_smoothing else 2, tokens)
        parts[0] = -torch.inf
        return parts

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the statistics [parts, n], and the largest logit of each token [n].

        The buffer then has exp(logit - largest).
        """
        head, x = self._head, self._hidden[chunk]
        if not head.width:
            return self.no_statistics(len(x)), x.new_zeros(len(x), dtype=head.dtype)
        logits = torch.mm(x, self._weight.t(), out=self._products[: len(x)])
        if head.bias is not None:
            logits += head.bias.detach()[: head.width]
        if logits.dtype != head.dtype:
            logits = self._values[: len(x)].copy_(logits)
        column, is_local = self._columns(chunk)
        parts = [logits.gather(1, column).squeeze(1).masked_fill_(~is_local, 0.0)]
        if head.label_smoothing:
            parts.append(logits.sum(1))
        largest = logits.amax(1)
        total = logits.sub_(largest.unsqueeze(1)).exp_().sum(1)
        return torch.stack([largest + total.log_(), *parts]), largest

    def _columns(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the columns of the targets [n, 1], and whether they are on this rank [n]."""
        target, start = self._target[chunk], self._head.start
        is_local = (target >= start) & (target < self._head.stop)
        return (target - start).masked_fill_(~is_local, 0).unsqueeze(1), is_local

    def add_gradients(
        self, chunk: slice, largest: Tensor, lse: Tensor, into: HeadGradients, scale: float
    ) -> None:
        """Compute the gradients of a chunk, whose statistics were computed just before."""
        head, x = self._head, self._hidden[chunk]
        if not head.width:
            return
        values, smoothing = self._values[: len(x)], head.label_smoothing
        share = (largest - lse).exp_().mul_(scale)
        if head.z_loss:
            share = share * (1 + 2 * head.z_loss * lse)
        values.mul_(share.unsqueeze(1))
        if smoothing:
            values.sub_(scale * smoothing / head.vocab_size)
        column, is_local = self._columns(chunk)
        at_target = is_local.to(head.dtype).mul_(-scale * (1 - smoothing))
        values.scatter_add_(1, column, at_target.unsqueeze(1))
        if self._ignored is not None:
            values.masked_fill_(self._ignored[chunk].unsqueeze(1), 0.0)
        if into.bias is not None:
            into.bias[: head.width] += values.sum(0)
        if self._products is not self._values:
            values = self._products[: len(x)].copy_(values)
        if into.hidden is not None:
            torch.mm(values, self._weight, out=into.hidden[chunk])
        if into.weight is not None:
            self._add_weight_gradient(values, x, into.weight[: head.width])

    def _add_weight_gradient(self, dlogits: Tensor, x: Tensor, into: Tensor) -> None:
        if into.dtype == x.dtype:
            torch.addmm(into, dlogits.t(), x, out=into)
            return
        # Products in half precision are added in fp32, in blocks of the size of a chunk.
        rows = max(1, dlogits.numel() // x.shape[1])
        for start in range(0, len(into), rows):
            block = dlogits[:, start : start + rows]
            into[start : start + rows].add_(block.t().mm(x))


class GradientSink(Protocol):
    """Takes weight gradients that do not come from autograd; see `WeightGradQueue`."""

    def add_at_once(self, weight: Any, gradient: Tensor) -> None: ...


@dataclass(frozen=True)
class DeferredLogits:
    """The output of a head whose logits have not been computed; a tree with the leaf `hidden`.

    Args:
        hidden: input of the head, equal on all tensor ranks; its gradient is summed over them.
        weight, bias: this rank's rows of the head, with padding.
        axis: the tensor axis.
        vocab_size: size of the vocabulary without padding.
        expected_gradient: expected gradient of the loss. Gradients are computed for it in forward,
            and in backward they are multiplied by the actual gradient divided by this one. So small
            gradients do not vanish in fp16.
        sink: takes the weight gradient; None: autograd does.
        counted: the number of labels that are not -100, which a step on a GPU must not read from
            the device; None: not known, or on a CPU.

    Shape:
        hidden [..., dim], weight [padded vocabulary / T, dim]
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    axis: Axis
    vocab_size: int
    expected_gradient: float = 1.0
    sink: GradientSink | None = None
    counted: int | None = None

    @classmethod
    def of(cls, head: Any, hidden: Tensor, vocab_size: int) -> "DeferredLogits":
        """Return the output of `head`, which has `weight`, `axis`, `weight_sink`, maybe `bias`."""
        assert _deferral is not None
        _, gradient, counted = _deferral
        bias, sink = getattr(head, "bias", None), head.weight_sink
        return cls(hidden, head.weight, bias, head.axis, vocab_size, gradient, sink, counted)

    def is_of(self, module: nn.Module) -> bool:
        """Return whether `module` is the head."""
        return hasattr(module, "weight_sink") and module.weight is self.weight


def _unflatten(leaves: Any, context: dict[str, Any]) -> DeferredLogits:
    (hidden,) = leaves
    return DeferredLogits(hidden, **context)


def _flatten(output: DeferredLogits) -> tuple[list[Any], dict[str, Any]]:
    context = {k: v for k, v in vars(output).items() if k != "hidden"}
    return [output.hidden], context


pytree.register_pytree_node(DeferredLogits, _flatten, _unflatten)

# While a layer defers its logits: the layer, the expected gradient of the loss, and the number of
# labels that count.
_deferral: tuple[nn.Module, float, int | None] | None = None


@contextmanager
def defer_logits(
    loss_fn: Callable[..., Any] | None,
    layer: nn.Module,
    expected_gradient: float = 1.0,
    counted: int | None = None,
) -> Iterator[None]:
    """Context in which `layer` returns DeferredLogits, if it is a head and `loss_fn` takes them.

    Args:
        loss_fn: the loss function; it takes DeferredLogits if its attribute `takes_deferred_logits`
            is true.
        layer: the last layer; a head within another layer computes its logits.
        expected_gradient, counted: see `DeferredLogits`.
    """
    global _deferral
    outer = _deferral
    _deferral = (layer, expected_gradient, counted) if takes_deferred_logits(loss_fn) else None
    try:
        yield
    finally:
        _deferral = outer


def takes_deferred_logits(loss_fn: Callable[..., Any] | None) -> bool:
    """Return whether `loss_fn` takes DeferredLogits in place of logits."""
    return getattr(loss_fn, "takes_deferred_logits", False)


def defers_logits(layer: nn.Module, head: Any, *others: nn.Module) -> bool:
    """Return whether `layer` returns DeferredLogits: within `defer_logits`, unless it cannot.

    It cannot if a hook takes its logits, or if its product is more than a plain linear's (LoRA).

    Args:
        head: the head in the layer, or the layer itself; has `product` and `weight_sink`.
        others: modules that also return the logits.
    """
    if _deferral is None or _deferral[0] is not layer:
        return False
    plain = head.product is F.linear or head.weight_sink is not None
    return plain and not any(map(_is_hooked, (layer, head, *others)))


def without_output(call: Callable[[], object]) -> Callable[..., None]:
    """Return a forward hook that does nothing but `call()`: a head with it may defer its logits."""

    def hook(*_: Any) -> None:
        call()

    vars(hook).update(ignores_output=True)
    return hook


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a hook takes the output of `module`, or the gradient of its output."""
    hooks = [*module._forward_hooks.values(), *_global_forward_hooks.values()]
    backward = (
        module._backward_hooks,
        module._backward_pre_hooks,
        _global_backward_hooks,
        _global_backward_pre_hooks,
    )
    return any(backward) or not all(getattr(hook, "ignores_output", False) for hook in hooks)


@dataclass(frozen=True)
class OutputShard:
    """The last dim of a layer's output is sharded over the tensor ranks, in rank order.

    A last layer has it as the attribute `output_shard`, so that metrics see the whole output. The
    layers of this package have it; a layer that contains one of them passes it on:

        self.output_shard = self.head.output_shard

    Args:
        axis: the tensor axis of the mesh.
        size: width of the whole output, without padding.
    """

    axis: Axis
    size: int

    def local_range(self, output: Tensor) -> tuple[int, int]:
        """Return [start, stop) of the columns of this rank's `output`, without padding."""
        return local_range(self.size, output.shape[-1], self.axis.rank)

    def gather(self, output: Tensor) -> Tensor:
        """Return the whole output; collective over the tensor ranks.

        Shape:
            output [..., padded size / T]  ->  [..., size]
        """
        return gather_from_tensor(output, self.axis)[..., : self.size]
