"""Split backward: I computes the gradient of a stage's input, W the gradients of its weights.

    forward     x -> SaveInput -> [ y = x Wᵀ + b, W detached ] -> QueueGradient -> y
    I           autograd computes dx; QueueGradient receives dy and queues (x, dy)
    W           dW = dyᵀ x for each queued pair, added directly to the gradient buffer

Only the weight gradients of linear, convolution and embedding layers and of experts are deferred.
Linears and convolutions are most of the work; the gradient of an embedding is dense, so in I it
would add to the memory peak. All other gradients (norms, biases, attention, routers) are computed
in I by autograd, so every module gets exact gradients.

The weight is not an input of the autograd graph, so no hook of the weight runs before W. A tensor
hook on y instead of QueueGradient would silently lose dW if y is a view that is changed in place.

Source: Qi et al. 2023, arXiv:2401.10241, section 2; the two identity nodes are ours.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Job = tuple[nn.Parameter, Callable[[], None]]


class GradAccumulator(Protocol):
    """Accumulates gradients; implemented by `optimizer.gradients.GradientBuffer`."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...


class GradReadyListener(Protocol):
    """Is notified of complete gradients; implemented by `optimizer.grad_ready`."""

    def begin(self) -> None: ...

    def final_backward(
        self, parameters: Iterable[nn.Parameter], pending: Collection[int] | None
    ) -> AbstractContextManager[None]: ...

    def mark_ready(self, parameter: nn.Parameter) -> None: ...


class WeightGradQueue:
    """Queue of deferred weight gradients.

    Args:
        into: accumulates the gradients.
    """

    def __init__(self, into: GradAccumulator) -> None:
        self._into = into
        self._queued: dict[Hashable, list[Job]] = defaultdict(list)
        self._key: Hashable | None = None

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Queue weight gradients under `key` within this context, instead of computing them."""
        assert self._key is None, f"the input-gradient backward of {self._key} is not finished"
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def run(self, key: Hashable, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """Compute the weight gradients of `key`; each pair (x, dy) is freed after its use.

        Args:
            done: called with each weight after its last gradient was added.
        """
        jobs = self._queued.pop(key, [])
        remaining = Counter(id(weight) for weight, _ in jobs)
        jobs.reverse()
        while jobs:
            weight, job = jobs.pop()
            job()
            del job
            remaining[id(weight)] -= 1
            if done is not None and not remaining[id(weight)]:
                done(weight)

    def pending_weights(self, key: Hashable) -> set[int]:
        """Return the ids of the parameters with queued gradients under `key`."""
        return {id(weight) for weight, _ in self._queued.get(key, ())}

    def add_at_once(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that exists already, in I too; see `linear_cross_entropy`."""
        with torch.no_grad():
            self._into.add(weight, gradient)

    def add(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Add `gradient()` to that of `weight`: in `run` if called within `defer`, else now."""

        def job() -> None:
            with torch.no_grad():
                self._into.add(weight, gradient())

        if self._key is None:
            job()
        else:
            self._queued[self._key].append((weight, job))


# (x, dy) -> dW
Gradient = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Deferred:
    """State of one layer call between forward and backward."""

    queue: WeightGradQueue
    weight: nn.Parameter
    gradient: Gradient
    saved: Any = None  # the autograd context with x
    # The output of that node, only if no other node needs it: before torch 2.13 a node without
    # references drops its tensors. Otherwise activation checkpointing must be able to free it.
    output: Tensor | None = None


class _SaveInput(torch.autograd.Function):
    """Identity that saves x for W.

    It runs before the matrix product: a recomputation stops once all tensors are saved, so it
    does not repeat the last product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, deferred: _Deferred, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        deferred.saved = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _QueueGradient(torch.autograd.Function):
    """Identity on y; its backward adds (x, dy) to the queue."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, deferred: _Deferred, anchor: Tensor, ids: Tensor | None
    ) -> Tensor:
        ctx.deferred = deferred
        if ids is not None:
            ctx.save_for_backward(ids)
        # Marked as changed in place, so that the result is y itself, not a view or a copy.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        deferred, dy = ctx.deferred, gradients[0]
        # Under activation checkpointing this recomputes x, so that W does not.
        (x,) = (deferred.saved or ctx).saved_tensors
        deferred.saved = deferred.output = None
        deferred.queue.add(deferred.weight, lambda: deferred.gradient(x, dy))
        return dy, None, None, None


def _defer(
    x: Tensor,
    weight: nn.Parameter,
    product: Callable[[Tensor], Tensor],
    gradient: Gradient,
    queue: WeightGradQueue,
) -> Tensor:
    """Return product(x); its backward adds the gradient of `weight` to the queue."""
    deferred = _Deferred(queue, weight, gradient)
    # Makes both nodes require a gradient, even if neither x nor a bias does.
    anchor = torch.zeros((), requires_grad=True)
    ids = None if x.is_floating_point() else x  # no autograd node outputs integers
    entering = x
    if ids is None:
        entering = _SaveInput.apply(x, deferred, anchor)  # type: ignore[no-untyped-call]
        if not x.requires_grad:
            # dx is not needed: the product uses x directly and has no gradient for it.
            deferred.output, entering = entering, x
    y = product(entering)
    result: Tensor = _QueueGradient.apply(y, deferred, anchor, ids)  # type: ignore[no-untyped-call]
    return result


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, queue: WeightGradQueue
) -> Tensor:
    """F.linear with a deferred weight gradient.

    Shape:
        x [..., in]  ->  [..., out]
    """
    if not _can_defer(weight):
        return F.linear(x, weight, bias)
    # Two dims: with more, F.linear returns a view, which cannot be marked as changed in place.
    rows, detached = x.reshape(-1, x.shape[-1]), weight.detach()
    y = _defer(rows, weight, lambda r: F.linear(r, detached, bias), _linear_gradient, queue)
    return y.view(*x.shape[:-1], y.shape[-1])


def _linear_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return dW [out, in] for x [n, in] and dy [n, out], by the same kernel as autograd."""
    return dy.t().mm(x.to(dy.dtype))


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, queue: WeightGradQueue
) -> Tensor:
    """F.embedding with a deferred weight gradient.

    Shape:
        ids [...]  ->  [..., dim]
    """
    if not _can_defer(weight):
        return F.embedding(ids, weight, padding_idx)
    detached, rows = weight.detach(), weight.shape[0]

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        """Return the dense gradient, by the same kernel as autograd."""
        ignored = -1 if padding_idx is None else padding_idx
        dw: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, rows, ignored, False)
        return dw

    return _defer(ids, weight, lambda i: F.embedding(i, detached, padding_idx), gradient, queue)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool = False,
    *,
    queue: WeightGradQueue | None = None,
) -> Tensor:
    """Return the product of each group of rows with its own weight, such as that of an expert.

    Args:
        counts: rows of each group [groups]; the rows are sorted by group.
        transposed: the weights are [groups, in, out] instead of [groups, out, in].
        queue: defers the weight gradients.

    Shape:
        x [rows, in]  ->  [rows, out]
    """
    sizes = counts.tolist()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        matrices = weight.unbind() if transposed else weight.transpose(-2, -1).unbind()
        return torch.cat([g.mm(m) for g, m in zip(torch.split(x, sizes), matrices, strict=True)])

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        pairs = zip(torch.split(x, sizes), torch.split(dy, sizes), strict=True)
        return torch.stack([a.t().mm(b) if transposed else b.t().mm(a) for a, b in pairs])

    if queue is None or not _can_defer(weight):
        return product(x, weight)
    detached = weight.detach()
    return _defer(x, weight, lambda x: product(x, detached), gradient, queue)


def _can_defer(weight: Tensor) -> TypeGuard[nn.Parameter]:
    # A user's hook on the weight must see its gradient, and only autograd calls it.
    has_hook = bool(weight._backward_hooks)
    return torch.is_grad_enabled() and weight.requires_grad and not has_hook


def enable_split_backward(modules: Iterable[nn.Module], queue: WeightGradQueue) -> None:
    """Make the layers in `modules` defer their weight gradients; parameter names do not change.

    The forward of nn.Linear, nn.Conv1d/2d/3d and nn.Embedding is replaced; subclasses are
    not changed, because they may compute something else. In a layer with an attribute `product`,
    `lookup` or `grouped_product`, as in tensor_parallel, this attribute is replaced; a head also
    gets the queue, because with its loss it computes weight gradients in F. A layer with a
    frozen weight is not changed: it has no weight gradient, and its `product` may be another one.
    """
    for module in {id(m): m for root in modules for m in root.modules()}.values():
        weight = module._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            continue
        if hasattr(module, "lookup"):
            vars(module)["lookup"] = partial(embedding, queue=queue)
        if hasattr(module, "grouped_product"):
            vars(module)["grouped_product"] = partial(grouped_linear, queue=queue)
        if hasattr(module, "weight_sink"):
            vars(module)["weight_sink"] = queue
        if hasattr(module, "product"):
            vars(module)["product"] = partial(linear, queue=queue)
        elif type(module) is nn.Linear:
            vars(module)["forward"] = partial(_linear_forward, module, queue=queue)
        elif type(module) in _CONVOLUTIONS and module.padding_mode == "zeros":
            vars(module)["forward"] = partial(_convolution_forward, module, queue=queue)
        elif type(module) is nn.Embedding and _has_dense_gradient(module):
            vars(module)["forward"] = partial(_embedding_forward, module, queue=queue)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _linear_forward(module: nn.Linear, x: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return linear(x, module.weight, module.bias, queue=queue)


def _has_dense_gradient(module: nn.Embedding) -> bool:
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _embedding_forward(module: nn.Embedding, ids: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return embedding(ids, module.weight, module.padding_idx, queue=queue)


def _convolution_forward(module: Any, x: Tensor, *, queue: WeightGradQueue) -> Tensor:
    weight: nn.Parameter = module.weight
    if not _can_defer(weight) or isinstance(module.padding, str):
        y: Tensor = module._conv_forward(x, weight, module.bias)
        return y
    detached = weight.detach()

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        batched = x.dim() == weight.dim()
        x, dy = (x, dy) if batched else (x.unsqueeze(0), dy.unsqueeze(0))
        _, dw, _ = torch.ops.aten.convolution_backward(
            dy, x.to(dy.dtype), detached.to(dy.dtype), None, module.stride, module.padding,
            module.dilation, False, [0] * len(module.stride), module.groups, [False, True, False],
        )  # fmt: skip
        assert isinstance(dw, Tensor)
        return dw

    return _defer(
        x, weight, lambda x: module._conv_forward(x, detached, module.bias), gradient, queue
    )
