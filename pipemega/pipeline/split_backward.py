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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.pipeline.deferred_gradients import (
    convolution,
    embedding,
    gathered_linear,
    grouped_linear,
    linear,
)


class Job(NamedTuple):
    """A queued weight gradient; `start` is called before `run`, at the earliest one job before."""

    weight: nn.Parameter
    start: Callable[[], object] | None
    run: Callable[[], None]


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
        remaining = Counter(id(job.weight) for job in jobs)
        jobs.reverse()
        _start_last(jobs)
        while jobs:
            job = jobs.pop()
            _start_last(jobs)  # overlaps with the product of `job`
            job.run()
            weight = job.weight
            del job
            remaining[id(weight)] -= 1
            if done is not None and not remaining[id(weight)]:
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
    ) -> None:
        """Add `gradient()` to that of `weight`: in `run` if called within `defer`, else now.

        Args:
            start: starts the communication that `gradient` waits for.
        """

        def run() -> None:
            with torch.no_grad():
                self._into.add(weight, gradient())

        if self._key is None:
            if start is not None:
                start()
            run()
        else:
            self._queued[self._key].append(Job(weight, start, run))


def _start_last(jobs: list[Job]) -> None:
    if jobs and jobs[-1].start is not None:
        jobs[-1].start()


def enable_split_backward(modules: Iterable[nn.Module], queue: WeightGradQueue) -> None:
    """Make the layers in `modules` defer their weight gradients; parameter names do not change.

    The forward of nn.Linear, nn.Conv1d/2d/3d and nn.Embedding is replaced; subclasses are
    not changed, because they may compute something else. In a layer with an attribute `product`,
    `lookup`, `grouped_product` or `gathered_product`, as in tensor_parallel, it is replaced; a head
    also gets the queue, because with its loss it computes weight gradients in F. A layer with a
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
        if getattr(module, "sequence_parallel", False) and hasattr(module, "gathered_product"):
            axis: Axis = module.axis  # type: ignore[assignment]
            vars(module)["gathered_product"] = partial(gathered_linear, queue=queue, axis=axis)
        if hasattr(module, "product"):
            vars(module)["product"] = partial(linear, queue=queue)
        elif type(module) is nn.Linear:
            vars(module)["forward"] = partial(linear_forward, module, queue=queue)
        elif type(module) in _CONVOLUTIONS and module.padding_mode == "zeros":
            vars(module)["forward"] = partial(convolution, module, queue=queue)
        elif type(module) is nn.Embedding and _has_dense_gradient(module):
            vars(module)["forward"] = partial(_embedding_forward, module, queue=queue)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def linear_forward(module: nn.Linear, x: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return linear(x, module.weight, module.bias, queue=queue)


def _has_dense_gradient(module: nn.Embedding) -> bool:
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _embedding_forward(module: nn.Embedding, ids: Tensor, *, queue: WeightGradQueue) -> Tensor:
    return embedding(ids, module.weight, module.padding_idx, queue=queue)
