"""Backward in two halves: I, the gradient of a stage's input, and W, that of its weights.

    forward     x -> take -> [ y = x Wᵀ + b, W without gradient ] -> give -> y
    I           dx comes from autograd; `give` learns dy and queues the pair (x, dy)
    W           dW = dyᵀ x for each pair, straight into the gradient buffer

Only the weights of linear, convolution and embedding layers are put off: most of the work, and, of
an embedding, the memory, since its gradient is dense and in I would come on top of all that waits.
All else in a stage (norms, biases, attention, routers) gets its gradients in I, by ordinary
autograd: so any module is exact, and what is covered only moves time from I to W.

The weight is no input of autograd, so no hook of it fires before W has run. A tensor hook on y in
place of `give` would lose dW without a word where y is a view that is changed in place.

Source: Qi et al. 2023, arXiv:2401.10241, section 2; the halves as two identity nodes are ours.
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


class Accumulator(Protocol):
    """Where gradients are summed up; a `gradients.GradientBuffer`."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...


class Arrivals(Protocol):
    """Is told which gradients of a step are final; an `optimizer.arrivals.BucketArrivals`."""

    def begin(self) -> None: ...

    def last_of(
        self, parameters: Iterable[nn.Parameter], waiting: Collection[int] | None
    ) -> AbstractContextManager[None]: ...

    def arrived(self, parameter: nn.Parameter) -> None: ...


class WeightGradients:
    """The weight halves that are still to be run.

    Args:
        into: takes each finished gradient.
    """

    def __init__(self, into: Accumulator) -> None:
        self._into = into
        self._queued: dict[Hashable, list[Job]] = defaultdict(list)
        self._key: Hashable | None = None

    @contextmanager
    def putting_off(self, key: Hashable) -> Iterator[None]:
        """Within, backward queues its weight halves under `key`; otherwise it runs them at once."""
        assert self._key is None, f"the input half of {self._key} is not done"
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def run(self, key: Hashable, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """The weight half of `key`; each pair of tensors is let go as soon as it is used.

        Args:
            done: told of each weight when the last of its jobs has run.
        """
        jobs = self._queued.pop(key, [])
        left = Counter(id(weight) for weight, _ in jobs)
        jobs.reverse()
        while jobs:
            weight, job = jobs.pop()
            job()
            del job
            left[id(weight)] -= 1
            if done is not None and not left[id(weight)]:
                done(weight)

    def weights_of(self, key: Hashable) -> set[int]:
        """Ids of the parameters whose gradients `key` still brings."""
        return {id(weight) for weight, _ in self._queued.get(key, ())}

    @property
    def pending(self) -> int:
        """Keys whose weight half has not run."""
        return len(self._queued)

    def clear(self) -> None:
        """Forgets what an interrupted step has left."""
        self._queued.clear()

    def take(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Adds `gradient()` to that of `weight`: now, or when the half that is under way is run."""

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
class _Tap:
    """What one product keeps between forward and backward."""

    queue: WeightGradients
    weight: nn.Parameter
    gradient: Gradient
    kept: Any = None  # the autograd context that holds x


class _Take(torch.autograd.Function):
    """Passes x on and keeps it for W.

    Before the product runs: so the second run of a checkpointed region, which ends as soon as
    everything is saved, does not repeat the last product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: _Tap, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        tap.kept = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Give(torch.autograd.Function):
    """Passes y on; backward, pairs dy with x and hands the pair to the queue."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tap: _Tap, anchor: Tensor) -> Tensor:
        ctx.tap = tap
        # "In place": y stays an ordinary tensor, no view of one and no copy.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        tap, dy = ctx.tap, gradients[0]
        # A checkpointed region computes x again here, once; W finds it.
        (x,) = tap.kept.saved_tensors
        tap.kept = None
        tap.queue.take(tap.weight, lambda: tap.gradient(x, dy))
        return dy, None, None


def _through(
    x: Tensor,
    weight: nn.Parameter,
    product: Callable[[Tensor], Tensor],
    gradient: Gradient,
    queue: WeightGradients,
) -> Tensor:
    """product(x), whose backward leaves the gradient of `weight` to the queue."""
    tap = _Tap(queue, weight, gradient)
    # Makes both nodes want a gradient, where neither x nor a bias does.
    anchor = torch.zeros((), requires_grad=True)
    taken: Tensor = _Take.apply(x, tap, anchor)  # type: ignore[no-untyped-call]
    # Where nobody wants dx, x itself: _Take has kept it all the same.
    y = product(taken if x.requires_grad else x)
    given: Tensor = _Give.apply(y, tap, anchor)  # type: ignore[no-untyped-call]
    return given


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, queue: WeightGradients
) -> Tensor:
    """F.linear whose weight gradient may wait.

    Shape:
        x [..., in]  ->  [..., out]
    """
    if not _can_wait(weight):
        return F.linear(x, weight, bias)
    # Two dims: the result of more is a view, which nobody may change in place.
    rows, fixed = x.reshape(-1, x.shape[-1]), weight.detach()
    y = _through(rows, weight, lambda r: F.linear(r, fixed, bias), _linear_gradient, queue)
    return y.view(*x.shape[:-1], y.shape[-1])


def _linear_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """dW [out, in] of x [n, in] and dy [n, out], by the very product that autograd runs."""
    return dy.t().mm(x.to(dy.dtype))


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, queue: WeightGradients
) -> Tensor:
    """F.embedding whose weight gradient may wait.

    Shape:
        ids [...]  ->  [..., dim]
    """
    if not _can_wait(weight):
        return F.embedding(ids, weight, padding_idx)
    fixed, rows = weight.detach(), weight.shape[0]

    def gradient(ids: Tensor, dy: Tensor) -> Tensor:
        """Dense, by the very function that autograd runs."""
        nobody = -1 if padding_idx is None else padding_idx
        dw: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, rows, nobody, False)
        return dw

    return _through(ids, weight, lambda i: F.embedding(i, fixed, padding_idx), gradient, queue)


def _can_wait(weight: Tensor) -> TypeGuard[nn.Parameter]:
    # A user's hook on the weight is to see its gradient, which only autograd shows it.
    hooked = bool(weight._backward_hooks)
    return torch.is_grad_enabled() and weight.requires_grad and not hooked


def split(modules: Iterable[nn.Module], queue: WeightGradients) -> None:
    """Makes the layers below `modules` put their weight gradients off; names stay as they are.

    Stock linears, convolutions and embeddings get a forward of their own; a subclass is left alone,
    since it may do something else. A layer with an attribute `product` or `lookup`, as those of
    tensor_parallel have, gets that replaced.
    """
    for module in {id(m): m for root in modules for m in root.modules()}.values():
        if hasattr(module, "lookup"):
            vars(module)["lookup"] = partial(embedding, queue=queue)
        if hasattr(module, "product"):
            vars(module)["product"] = partial(linear, queue=queue)
        elif type(module) is nn.Linear:
            vars(module)["forward"] = partial(_linear_forward, module, queue=queue)
        elif type(module) in _CONVOLUTIONS and module.padding_mode == "zeros":
            vars(module)["forward"] = partial(_convolution_forward, module, queue=queue)
        elif type(module) is nn.Embedding and _is_plain(module):
            vars(module)["forward"] = partial(_embedding_forward, module, queue=queue)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _linear_forward(module: nn.Linear, x: Tensor, *, queue: WeightGradients) -> Tensor:
    return linear(x, module.weight, module.bias, queue=queue)


def _is_plain(module: nn.Embedding) -> bool:
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _embedding_forward(module: nn.Embedding, ids: Tensor, *, queue: WeightGradients) -> Tensor:
    return embedding(ids, module.weight, module.padding_idx, queue=queue)


def _convolution_forward(module: Any, x: Tensor, *, queue: WeightGradients) -> Tensor:
    weight: nn.Parameter = module.weight
    if not _can_wait(weight) or isinstance(module.padding, str):
        y: Tensor = module._conv_forward(x, weight, module.bias)
        return y
    fixed = weight.detach()

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        batched = x.dim() == weight.dim()
        x, dy = (x, dy) if batched else (x.unsqueeze(0), dy.unsqueeze(0))
        _, dw, _ = torch.ops.aten.convolution_backward(
            dy, x.to(dy.dtype), fixed.to(dy.dtype), None, module.stride, module.padding,
            module.dilation, False, [0] * len(module.stride), module.groups, [False, True, False],
        )  # fmt: skip
        assert isinstance(dw, Tensor)
        return dw

    return _through(
        x, weight, lambda x: module._conv_forward(x, fixed, module.bias), gradient, queue
    )
