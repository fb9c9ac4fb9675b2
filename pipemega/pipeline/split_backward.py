"""Split backward: I computes the gradient of a stage's input, W the gradients of its weights.

    F           layers of deferred_gradients.py
    I           autograd computes dx and the queue gets x and dy of each layer
    W           dW = dyᵀ x for each queued pair, added directly to the gradient buffer

Only the weight gradients of linear, convolution and embedding layers and of experts are deferred.
Linears and convolutions are most of the work; the gradient of an embedding is dense, so in I it
would add to the memory peak. All other gradients (norms, biases, attention, routers) are computed
in I by autograd, so every module gets exact gradients.

Source: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.pipeline.deferred_gradients import (
    convolution,
    embedding,
    gathered_linear,
    grouped_linear,
    linear,
)
from pipemega.tensor_parallel.layers import ColumnParallelLinear


class Job(NamedTuple):
    """A queued weight gradient.

    Args:
        start: called before `gradient`, at the earliest one job before.
        is_summed: gradients of one weight are summed before they are added, as autograd does it.
    """

    weight: nn.Parameter
    start: Callable[[], object] | None
    gradient: Callable[[], Tensor]
    is_summed: bool


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
        self._held: set[int] = set()
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

    @property
    def defers(self) -> bool:
        """Whether `add` queues; otherwise it computes at once."""
        return self._key is not None

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take gradients of these parameters."""
        self._held.update(map(id, parameters))

    def holds(self, weight: Tensor) -> bool:
        """Return whether `hold` got this weight."""
        return id(weight) in self._held

    @torch.no_grad()
    def run(self, key: Hashable, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """Compute the weight gradients of `key`; each pair (x, dy) is freed after its use.

        Args:
            done: called with each weight after its last gradient was added.
        """
        jobs = self._queued.pop(key, [])
        remaining = Counter(id(job.weight) for job in jobs)
        sums: dict[int, Tensor] = {}
        jobs.reverse()
        _start_last(jobs)
        while jobs:
            job = jobs.pop()
            _start_last(jobs)  # overlaps with the product of `job`
            weight, gradient, number = job.weight, job.gradient(), id(job.weight)
            remaining[number] -= 1
            if job.is_summed:
                if number in sums:
                    gradient = sums.pop(number) + gradient
                if remaining[number]:
                    sums[number] = gradient
                    continue
            del job
            self._into.add(weight, gradient)
            if done is not None and not remaining[number]:
                done(weight)

    def pending_weights(self, key: Hashable) -> set[int]:
        """Return the ids of the parameters with queued gradients under `key`."""
        return {id(job.weight) for job in self._queued.get(key, ())}

    def add_at_once(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that exists already, in I too; see `linear_cross_entropy`."""
        with torch.no_grad():
            self._into.add(weight, gradient)

    def add(
        self,
        weight: nn.Parameter,
        gradient: Callable[[], Tensor],
        start: Callable[[], object] | None = None,
        *,
        is_summed: bool = True,
    ) -> None:
        """Add `gradient()` to that of `weight`: in `run` if called within `defer`, else now.

        Args:
            start: starts the communication that `gradient` waits for.
            is_summed: see `Job`; only within `defer`.
        """
        if self._key is not None:
            self._queued[self._key].append(Job(weight, start, gradient, is_summed))
            return
        if start is not None:
            start()
        self.add_at_once(weight, gradient())


def _start_last(jobs: list[Job]) -> None:
    if jobs and jobs[-1].start is not None:
        jobs[-1].start()


def enable_split_backward(modules: Iterable[nn.Module], queue: WeightGradQueue) -> None:
    """Make the layers in `modules` defer their weight gradients; parameter names do not change.

    The forward of the layers that `_forward_of` names is replaced. In layers of pipemega the
    product is; a head also gets the queue, because with its loss it computes weight gradients in F.
    All other layers run their whole backward in I, and so do those of a class with the attribute
    `split_backward = False`. A layer with a frozen weight is not changed: it has no weight
    gradient, and its `product` may be another one.
    """
    roots = list(modules)
    for root in roots:
        queue.hold(root.parameters())
    for module in {id(m): m for root in roots for m in _splitting(root)}.values():
        _restore(module)
        weight = module._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            continue
        # By what they are: a module of a user may have attributes of these names.
        product = getattr(module, "product", None)
        if getattr(module, "lookup", None) is F.embedding:
            _replace(module, lookup=partial(embedding, queue=queue))
        if getattr(module, "grouped_product", None) is grouped_linear:
            _replace(module, grouped_product=partial(grouped_linear, queue=queue))
        if product is F.linear:
            _replace(module, product=partial(linear, queue=queue))
            if hasattr(module, "weight_sink"):
                _replace(module, weight_sink=queue)
            if isinstance(module, ColumnParallelLinear) and module.sequence_parallel:
                gathered = partial(gathered_linear, queue=queue, axis=module.axis)
                _replace(module, gathered_product=gathered)
        elif (forward := _forward_of(module)) is not None:
            _replace(module, forward=partial(forward, module, queue=queue))


def _replace(module: nn.Module, **attributes: Any) -> None:
    replaced = vars(module).setdefault("_before_split_backward", {})
    replaced.update({name: vars(module).get(name, _MISSING) for name in attributes})
    vars(module).update(attributes)


def _restore(module: nn.Module) -> None:
    """Undo `_replace` of another queue: of an earlier engine, or of the original of a copy."""
    for name, value in vars(module).pop("_before_split_backward", {}).items():
        vars(module)[name] = value
        if value == _MISSING:
            del vars(module)[name]


_MISSING = "no attribute of the instance"


def _splitting(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose backward may be split."""
    if getattr(module, "split_backward", True) is not False:
        yield module
        for child in module.children():
            yield from _splitting(child)


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return the forward with a deferred weight gradient; None if the module may not have it.

    It has exactly the type of a torch layer, with the forward of this type, and its weight is a
    parameter of its own: subclasses, `weight_norm` and replaced forwards may compute something
    else.
    """
    kind = type(module)
    if kind.forward is not _FORWARDS.get(kind) or "forward" in vars(module):
        return None
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return linear_forward
    if isinstance(module, nn.Embedding):
        return _embedding_forward if _has_dense_gradient(module) else None
    return convolution if module.padding_mode == "zeros" else None


_FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
}


def linear_forward(module: nn.Linear, x: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return linear(x, module.weight, module.bias, queue=queue)


def _has_dense_gradient(module: nn.Embedding) -> bool:
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _embedding_forward(module: nn.Embedding, ids: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return embedding(ids, module.weight, module.padding_idx, queue=queue)
