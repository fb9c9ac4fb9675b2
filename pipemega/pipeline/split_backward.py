"""Split backward: I computes the gradient of a stage's input, W the gradients of its weights.

    F           layers of split_backward.py
    I           autograd computes dx and the queue gets x and dy of each layer
    W           dW = dyᵀ x for each queued pair, added directly to the gradient buffer

Only the weight gradients of linear, convolution and embedding layers and of experts are deferred.
Linears and convolutions are most of the work; the gradient of an embedding is dense, so in I it
would add to the memory peak. All other gradients (norms, biases, attention, routers) are computed
in I by autograd, so every module gets exact gradients.

Source: Qi et al. 2023, arXiv:2401.10241, section 2.

Products of layers that put their weight gradients in a queue; autograd does not compute them.

    forward     x -> SaveInput -> [ y = x Wᵀ + b, W detached ] -> QueueGradient -> y
    backward    autograd computes dx; QueueGradient receives dy and queues (x, dy)

The queue keeps x and dy. x is the tensor that autograd would keep: under autocast the cast tensor,
with sequence parallelism this rank's slice, which is gathered again for dW. If another node has
saved x too, as the one of tanh saves its output, both share its memory.

The weight is an input of QueueGradient, which in I returns no gradient for it: then autograd adds
nothing and calls no hook of the weight. In a whole backward it returns dW, and autograd sums and
adds it as without a queue. It also finds out whether this backward reaches the weight at all:
`torch.autograd.grad(y, x)` within a layer does not. A tensor hook on y instead of QueueGradient
would silently lose dW if y is a view that is changed in place.

Source: Qi et al. 2023, arXiv:2401.10241, section 2; the two identity nodes are ours.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.parameters import has_user_hook
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel.collectives import (
    SEQUENCE_DIM,
    Pending,
    gather_sequence,
    keeping,
    start_all_gather,
)
from pipemega.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearProducts,
    RowParallelLinear,
    column_product,
    gradient_of,
    linear_gradient,
)
from pipemega.tensor_parallel.overlapped_products import overlaps, row_product, rows_of

# (x, dy) -> dW
Gradient = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Deferred:
    """State of one layer call between forward and backward."""

    queue: WeightGradQueue
    weight: nn.Parameter
    gradient: Gradient
    gathers: Axis | None = None  # x is this rank's slice of the sequence
    saved: Any = None  # the autograd context with x
    # The output of that node, only if no other node needs it: before torch 2.13 a node without
    # references drops its tensors. Otherwise activation checkpointing must be able to free it.
    output: Tensor | None = None
    # dy from the product's own backward, which gathers it; see `scattered_linear`.
    whole_dy: list[Tensor] = field(default_factory=list)


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
    """Identity on y; its backward adds (x, dy) to the queue, or returns dW."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, deferred: _Deferred, ids: Tensor | None
    ) -> Tensor:
        ctx.deferred = deferred
        if ids is not None:
            ctx.save_for_backward(ids)
        # Marked as changed in place, so that the result is y itself, not a view or a copy.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        deferred, passed = ctx.deferred, gradients[0]
        if torch.is_grad_enabled():
            raise ConfigError(
                "torch.autograd.grad(create_graph=True) needs the weights in the graph, from which "
                "split backward removes them: set split_backward = False on the class of the "
                "layer, or use a schedule without split backward, such as '1f1b', and "
                "gradient_accumulation_fusion false"
            )
        accumulates, returns = _reaches(ctx.next_functions[1][0])
        dy = deferred.whole_dy.pop() if deferred.whole_dy else passed
        if not (accumulates or returns):
            return passed, None, None, None
        # Under activation checkpointing this recomputes x, so that W does not.
        (x,) = (deferred.saved or ctx).saved_tensors
        if accumulates:
            # Otherwise the graph may be used again.
            deferred.saved = deferred.output = None
        whole = None if deferred.gathers is None else _GatheredInput(x, deferred.gathers)
        start = None if whole is None else whole.start

        weight, queue = deferred.weight, deferred.queue
        is_linear = deferred.gradient is linear_gradient
        fuses = accumulates and queue.fuses_products and is_linear and queue.fuses(weight, dy)

        def gradient() -> Tensor | None:
            rows = x if whole is None else whole.take()
            if fuses:
                queue.add_product(weight, dy.flatten(0, -2), rows.flatten(0, -2))
                return None
            dw: Tensor = deferred.gradient(rows, dy)
            return dw

        if accumulates and queue.takes_gradients:
            queue.add(weight, gradient, start)
            return passed, None, None, None
        if start is not None:
            start()
        return passed, gradient(), None, None


class _QueueWholeGradient(_QueueGradient):
    """Identity on x; its backward, which runs after the product's, queues (x, whole dy)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deferred: _Deferred, ids: Tensor | None
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.save_for_backward(x)
        return x.view_as(x)


def _reaches(node: Any) -> tuple[bool, bool]:
    """Return whether the current backward accumulates the gradient of a leaf, or returns it.

    Neither, if `torch.autograd.grad` computes the gradients of other tensors only.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node)), False
    except RuntimeError:  # torch.autograd.grad asks for the gradient of the leaf itself
        return False, True


class _GatheredInput:
    """x of all tensor ranks, gathered from their slices of the sequence."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self._x, self._axis = x, axis
        self._pending: Pending | None = None

    def start(self) -> None:
        with torch.no_grad():
            self._pending = start_all_gather(self._x, self._axis, SEQUENCE_DIM)

    def take(self) -> Tensor:
        """Return x [rows, in]."""
        assert self._pending is not None, "not started"
        pending, self._pending = self._pending, None
        return pending().reshape(-1, self._x.shape[-1])


def _defer(
    x: Tensor,
    weight: nn.Parameter,
    product: Callable[[Tensor], Tensor],
    gradient: Gradient,
    queue: WeightGradQueue,
    gathers: Axis | None = None,
) -> Tensor:
    """Return product(x); its backward adds the gradient of `weight` to the queue.

    Args:
        gradient: function of x and dy that returns the gradient of `weight`.
        gathers: `gradient` gets x gathered over this axis, as rows.
    """
    deferred = _Deferred(queue, weight, gradient, gathers)
    # Makes the node require a gradient, even if x does not.
    anchor = torch.zeros((), requires_grad=True)
    ids = None if x.is_floating_point() else x  # no autograd node outputs integers
    x = _as_autocast(x)
    entering = x
    if ids is None:
        entering = _SaveInput.apply(x, deferred, anchor)  # type: ignore[no-untyped-call]
        if not x.requires_grad:
            # dx is not needed: the product uses x directly and has no gradient for it.
            deferred.output, entering = entering, x
    y = product(entering)
    if keeping.get() == "off":
        return _queued(y, weight, deferred, ids)
    # Marked as changed in place, which y is not: a recomputation that keeps y must not refuse it.
    with _unsafe_preserve_version_counter(y):
        return _queued(y, weight, deferred, ids)


_queued: Callable[..., Tensor] = _QueueGradient.apply


def _as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype in which autocast multiplies it, so that W does not keep it in fp32."""
    device = x.device.type
    casts = x.is_floating_point() and x.dtype != torch.float64 and not x.is_meta
    if not (casts and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queue: WeightGradQueue,
    products: LinearProducts | None = None,
) -> Tensor:
    """F.linear, or `products` in its place, with a deferred weight gradient.

    Shape:
        x [..., in]  ->  [..., out]
    """
    product = products or F.linear
    if not _can_defer(weight, queue):
        return product(x, weight, bias)
    # Two dims: with more, F.linear returns a view, which cannot be marked as changed in place.
    rows, detached = rows_of(x), weight.detach()
    gradient = gradient_of(products)
    y = _defer(rows, weight, lambda r: product(r, detached, bias), gradient, queue)
    return y.view(*x.shape[:-1], y.shape[-1])


def gathered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queue: WeightGradQueue,
    axis: Axis,
    products: LinearProducts | None = None,
) -> Tensor:
    """`linear` of x gathered over `axis`, with a deferred weight gradient.

    Only this rank's slice of x is kept for W, which gathers it again.

    Shape:
        x [batch, seq / T, in]  ->  [batch, seq, out / T]
    """
    if not _can_defer(weight, queue):
        return column_product(x, weight, bias, axis, True, products)
    detached = weight.detach()
    overlapped = products is None and overlaps(x, axis)

    def product(x: Tensor) -> Tensor:
        if overlapped:
            return column_product(x, detached, bias, axis, sequence_parallel=True)
        whole = gather_sequence(x, axis)
        return (products or F.linear)(whole.reshape(-1, x.shape[-1]), detached, bias)

    y = _defer(x, weight, product, gradient_of(products), queue, axis)
    shape = list(x.shape)
    shape[SEQUENCE_DIM] *= axis.size
    return y.view(*shape[:-1], y.shape[-1])


def scattered_linear(x: Tensor, weight: Tensor, axis: Axis, *, queue: WeightGradQueue) -> Tensor:
    """`row_product` with a deferred weight gradient.

    Its backward gathers dy, in pieces, so the queue gets the whole dy from there.

    Shape:
        x [batch, seq, in / T]  ->  [batch, seq / T, out]
    """
    if not _can_defer(weight, queue):
        return row_product(x, weight, axis)
    deferred = _Deferred(queue, weight, linear_gradient)
    x = _QueueWholeGradient.apply(x, weight, deferred, None)  # type: ignore[no-untyped-call]
    return row_product(x, weight.detach(), axis, deferred.whole_dy)


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, queue: WeightGradQueue
) -> Tensor:
    """F.embedding with a deferred weight gradient.

    Shape:
        ids [...]  ->  [..., dim]
    """
    if not _can_defer(weight, queue):
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
    sizes: Sequence[int],
    transposed: bool = False,
    *,
    queue: WeightGradQueue | None = None,
) -> Tensor:
    """Return the product of each group of rows with its own weight, such as an expert's weight.

    Args:
        sizes: rows of each group; the rows are sorted by group.
        transposed: the weights are [groups, in, out] instead of [groups, out, in].
        queue: defers the weight gradients.

    Shape:
        x [rows, in]  ->  [rows, out]
    """
    sizes, x = list(sizes), _as_autocast(x)
    ends = _group_ends(x, weight, sizes)
    grouped: Callable[[Tensor, Tensor], Tensor] = partial(
        _grouped_products, sizes=sizes, transposed=transposed, ends=ends
    )
    if queue is None or not _can_defer(weight, queue):
        return grouped(x, _as_autocast(weight))
    detached = weight.detach()
    gradient = partial(_grouped_gradient, sizes=sizes, transposed=transposed, ends=ends)
    return _defer(x, weight, lambda x: grouped(x, _as_autocast(detached)), gradient, queue)


def _grouped_products(
    x: Tensor, weight: Tensor, sizes: list[int], transposed: bool, ends: Tensor | None
) -> Tensor:
    matrices = weight if transposed else weight.transpose(-2, -1)
    if ends is not None:
        return F.grouped_mm(x, matrices, offs=ends)
    if keeping.get() == "off":
        products: Tensor = _GroupedProducts.apply(x, weight, sizes, transposed)  # type: ignore[no-untyped-call]
        return products
    # A recomputation that keeps products must see their results.
    pairs = zip(torch.split(x, sizes), matrices.unbind(), strict=True)
    return torch.cat([group.mm(matrix) for group, matrix in pairs])


class _GroupedProducts(torch.autograd.Function):
    """Products that are written to their place in one result, in forward and in backward.

    Autograd would join the results of a product each by a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.transposed = sizes, transposed
        return _multiplied(x, weight if transposed else weight.transpose(-2, -1), sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _multiplied(dy, weight.transpose(-2, -1) if ctx.transposed else weight, ctx.sizes)
        if ctx.needs_input_grad[1]:
            dweight = _grouped_gradient(x, dy, ctx.sizes, ctx.transposed, None)
        return dx, dweight, None, None


def _multiplied(rows: Tensor, matrices: Tensor, sizes: list[int]) -> Tensor:
    """Return the products of groups of rows with a matrix each [groups, in, out]."""
    result = rows.new_empty(len(rows), matrices.shape[-1])
    groups = zip(torch.split(rows, sizes), matrices, torch.split(result, sizes), strict=True)
    for group, matrix, place in groups:
        torch.mm(group, matrix, out=place)
    return result


def _grouped_gradient(
    x: Tensor, dy: Tensor, sizes: list[int], transposed: bool, ends: Tensor | None
) -> Tensor:
    a, b = (x, dy) if transposed else (dy, x)
    if ends is not None:
        return F.grouped_mm(a.t(), b, offs=ends)
    result = a.new_empty(len(sizes), a.shape[1], b.shape[1])
    for rows, columns, place in zip(
        torch.split(a, sizes), torch.split(b, sizes), result, strict=True
    ):
        torch.mm(rows.t(), columns, out=place)
    return result


def _group_ends(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """Return the end of each group for torch's grouped product; None where it cannot be used.

    It takes narrow floats, in rows of multiples of 16 bytes. On a CPU it is slower for fp32, and
    with bf16 torch 2.13 may crash.
    """
    fits = x.dtype == weight.dtype and x.dtype in (torch.float16, torch.bfloat16)
    if not (x.is_cuda and fits) or any(size % 8 for size in weight.shape[1:]):
        return None
    if not hasattr(F, "grouped_mm") or not len(x):
        return None
    return torch.tensor(sizes, device=x.device).cumsum(0).int()


def _can_defer(weight: Tensor, queue: WeightGradQueue) -> TypeGuard[nn.Parameter]:
    """Return whether the gradient of `weight` may be computed later, at the time of the forward."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    # Not the result of another function, as with weight_norm, and not from functional_call.
    if type(weight) is not nn.Parameter or not queue.holds(weight):
        return False
    # The products above are for real numbers: without the conjugate of x. vmap and
    # torch.func.grad have rules for autograd's products only.
    transformed: bool = torch._C._are_functorch_transforms_active()
    # Only autograd calls a user's hook on the weight.
    return not (weight.is_complex() or transformed or has_user_hook(weight))


def convolution(module: Any, x: Tensor, *, queue: WeightGradQueue) -> Tensor:
    """The forward of nn.Conv1d, nn.Conv2d or nn.Conv3d `module` with a deferred weight gradient."""
    weight: nn.Parameter = module.weight
    if not _can_defer(weight, queue) or isinstance(module.padding, str):
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


def enable_split_backward(modules: Iterable[nn.Module], queue: WeightGradQueue) -> None:
    """Make the layers in `modules` defer their weight gradients; parameter names do not change.

    The forward of the layers that `_forward_of` names is replaced. In layers of pipemega the
    product is; a head also gets the queue, because with its loss it computes weight gradients in F.
    All other layers run their whole backward in I, and so do layers of a class with the attribute
    `split_backward = False`. A layer with a frozen weight is not changed: it has no weight
    gradient, and its `product` may be another one.
    """
    roots = list(modules)
    for root in roots:
        queue.hold(root.parameters())
    for module in {id(m): m for root in roots for m in _splitting(root)}.values():
        undo_split_backward(module)
        weight = module._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            continue
        # By what they are: a module of a user may have attributes of these names.
        product = getattr(module, "product", None)
        if getattr(module, "lookup", None) is F.embedding:
            _replace(module, lookup=partial(embedding, queue=queue))
        if getattr(module, "grouped_product", None) is grouped_linear:
            _replace(module, grouped_product=partial(grouped_linear, queue=queue))
        if product is F.linear or isinstance(product, LinearProducts):
            options: dict[str, Any] = {}
            if isinstance(product, LinearProducts):
                options["products"] = product
            _replace(module, product=partial(linear, queue=queue, **options))
            if hasattr(module, "weight_sink"):
                _replace(module, weight_sink=queue)
            if isinstance(module, ColumnParallelLinear):
                gathered = partial(gathered_linear, queue=queue, axis=module.axis, **options)
                _replace(module, gathered_product=gathered if module.sequence_parallel else None)
            if isinstance(module, RowParallelLinear) and module.sequence_parallel and not options:
                _replace(module, overlapped_product=partial(scattered_linear, queue=queue))
        elif (forward := _forward_of(module)) is not None:
            _replace(module, forward=partial(forward, module, queue=queue))


def _replace(module: nn.Module, **attributes: Any) -> None:
    replaced = vars(module).setdefault("_before_split_backward", {})
    replaced.update({name: vars(module).get(name, _MISSING) for name in attributes})
    vars(module).update(attributes)


def undo_split_backward(module: nn.Module) -> None:
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
