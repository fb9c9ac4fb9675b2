"""The deferred weight gradient of a linear within a compiled layer.

    forward     y = x Wᵀ + b
    backward    dx = dy W, and (x, dy) to the queue: one operator of the graph

The graph of a compiled layer is the same for all layers of its class, so the linear is not a
constant of it but an input: a tensor with the number of the linear.
"""

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn import functional as F

from pipemega.pipeline import deferred_gradients, split_backward
from pipemega.pipeline.split_backward import WeightGradQueue


class _Target:
    """The weight of one linear, and the queue that takes its gradients."""

    def __init__(self, queue: WeightGradQueue, module: nn.Module) -> None:
        # The module and not its weight, which may be replaced by a tied one.
        self.queue, self._module = queue, weakref.ref(module)

    def add(self, x: Tensor, dy: Tensor) -> None:
        module = self._module()
        weight = None if module is None else module._parameters["weight"]
        assert weight is not None
        # Not summed: in a whole backward each gradient is added as it comes.
        gradient = partial(deferred_gradients.linear_gradient, x, dy)
        self.queue.add(weight, gradient, is_summed=False)


_numbers = itertools.count()
_targets: "weakref.WeakValueDictionary[int, _Target]" = weakref.WeakValueDictionary()


def trace_deferred_gradients(modules: Iterable[nn.Module]) -> None:
    """Let layers that defer weight gradients be compiled; see `enable_split_backward`.

    Linears are a part of the graph. Between other layers with deferred gradients (embeddings,
    convolutions) the graph is cut.
    """
    for module in modules:
        for name in ("product", "forward", "lookup"):
            replaced = vars(module).get(name)
            if isinstance(replaced, partial) and "queue" in replaced.keywords:
                _trace(module, name, replaced)


def _trace(module: nn.Module, name: str, replaced: Any) -> None:
    queue = replaced.keywords["queue"]
    if replaced.func not in (deferred_gradients.linear, split_backward.linear_forward):
        vars(module)["_untraced"] = replaced
        # The same function for all modules, because a graph is compiled for one.
        vars(module)[name] = (
            MethodType(_untraced_forward, module)
            if name == "forward"
            else torch.compiler.disable(replaced)  # type: ignore[no-untyped-call]
        )
        return
    number, target = next(_numbers), _Target(queue, module)
    _targets[number] = target
    vars(module).update(_deferred_target=target, _deferred_number=torch.tensor(number))
    vars(module)[name] = (
        MethodType(_linear_forward, module)
        if name == "forward"
        else partial(_linear, queue=queue, number=vars(module)["_deferred_number"])
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced_forward(module: Any, *args: Any) -> Any:
    return module._untraced(*args)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queue: WeightGradQueue | None,
    number: Tensor,
) -> Tensor:
    """`deferred_gradients.linear`, also within a graph, which finds the queue by the number."""
    if not torch.compiler.is_compiling():
        assert queue is not None
        return deferred_gradients.linear(x, weight, bias, queue=queue)
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    if not x.requires_grad:
        # The compiler would remove the operator, because nothing needs dx.
        untraced: Tensor = _untraced_linear(x, weight, bias, number)
        return untraced
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _DeferredLinear.apply(rows, weight, bias, number)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


def _linear_forward(module: Any, x: Tensor) -> Tensor:
    queue = None if torch.compiler.is_compiling() else module._deferred_target.queue
    return _linear(x, module.weight, module.bias, queue=queue, number=module._deferred_number)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    return deferred_gradients.linear(x, weight, bias, queue=_targets[int(number)].queue)


class _DeferredLinear(torch.autograd.Function):
    """x [n, in] -> [n, out]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight, number = ctx.saved_tensors
        db = dy.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return _input_gradient(dy, x, weight, number), None, db, None


@library.custom_op("pipemega::input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    """Return dx = dy W [n, in], and add (x, dy) to the queue of linear `number`."""
    _targets[int(number)].add(x, dy)
    return dy.mm(weight)


@_input_gradient.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1])
