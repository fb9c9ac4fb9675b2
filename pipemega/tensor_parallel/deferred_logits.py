"""Logits that are not computed: a fused loss takes the input of the head and the head itself.

with defer_logits(loss_fn, head): the executor, if only the loss needs the logits
    output = head(hidden)         DeferredLogits(hidden, weight, ...)
loss = loss_fn(output, labels)    computes logits and gradients, a chunk at a time
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
)
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Axis


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
        vocab_size: without padding.
        expected_gradient: of the loss: gradients are computed for it in the forward, and multiplied
            in backward by what the gradient is divided by it. So small gradients do not vanish in
            fp16.
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
        loss_fn: takes them if its attribute `takes_deferred_logits` is true.
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

    It cannot if a hook takes its logits, or if the product is not that of a plain linear (LoRA).

    Args:
        head: of the layer, or the layer itself; has `product` and `weight_sink`.
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
