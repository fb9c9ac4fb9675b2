"""Graphs on the CPU: the operations of a capture run again on the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.engine import run_setup

ORIGINAL = torch.cuda.make_graphed_callables


class _Recorded(TorchDispatchMode):
    """Records the operations of its context."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, ...]] = []
        # Storages, by whether an operation here has made them.
        self._made: set[int] = set()
        self._inputs: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        _wait(func, result)
        self._inputs |= _storages(args, kwargs) - self._made
        self._made |= _storages(result) - self._inputs
        # Other tensors of the same memory: an operation may change the shape of its own in place.
        self._calls.append(pytree.tree_map(_alias, (func, args, kwargs or {}, result)))
        return result

    def spoil(self) -> None:
        """Fill the memory of the graph with NaN."""
        for *_, result in self._calls:
            for tensor in _tensors(result):
                own = tensor.untyped_storage()._cdata in self._made
                if own and tensor.is_floating_point():
                    tensor.data.fill_(float("nan"))

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                again = func(*pytree.tree_map(_alias, args), **pytree.tree_map(_alias, kwargs))
                _wait(func, again)
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _wait(func: Any, result: Any) -> None:
    if func.namespace == "c10d":
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, Tensor) and hasattr(leaf, "wait"):
                leaf.wait()


def _storages(*trees: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(*trees)}


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def make_graphed_callables(
    modules: tuple[nn.Module, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
) -> tuple[nn.Module, ...]:
    """Do what `torch.cuda.make_graphed_callables` does for tuples of modules."""
    inputs = [
        [*pytree.tree_leaves(args), *module.parameters()]
        for module, args in zip(modules, sample_args, strict=True)
    ]

    def gradients(leaves: list[Tensor], surface: list[Tensor], grads: list[Tensor]) -> Any:
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        if not outputs:
            return [None] * len(surface)
        wanted = [t for t in surface if t.requires_grad]
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=allow_unused_input)
        by_id = dict(zip(map(id, wanted), found, strict=True))
        return [by_id.get(id(t)) for t in surface]

    def like(leaves: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(leaf) for leaf in leaves if leaf.requires_grad]

    for module, args, surface in zip(modules, sample_args, inputs, strict=True):
        for _ in range(num_warmup_iters):
            leaves = pytree.tree_leaves(module(*args))
            gradients(leaves, surface, like(leaves))
    forwards, results = [_Recorded() for _ in modules], []
    for module, args, forward in zip(modules, sample_args, forwards, strict=True):
        with forward:
            results.append(module(*args))
    for module, result, surface, forward in reversed(
        [*zip(modules, results, inputs, forwards, strict=True)]
    ):
        leaves, spec = pytree.tree_flatten(result)
        given, backward = like(leaves), _Recorded()
        with backward:
            found = gradients(leaves, surface, given)
        module.forward = _graphed(surface, leaves, spec, given, found, forward, backward)
    return modules


def _graphed(
    surface: list[Tensor],
    leaves: list[Tensor],
    spec: Any,
    given: list[Tensor],
    found: list[Tensor | None],
    forward: _Recorded,
    backward: _Recorded,
) -> Callable[..., Any]:
    needed = [leaf.requires_grad for leaf in leaves]

    class _Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> tuple[Tensor, ...]:
            for mine, arg in zip(surface, args, strict=True):
                if mine.data_ptr() != arg.data_ptr():
                    mine.data.copy_(arg)
            # What the last micro-batch has left is not used any more.
            forward.spoil()
            backward.spoil()
            forward.replay()
            return tuple(leaf.detach() for leaf in leaves)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            incoming = [grad for grad, need in zip(grads, needed, strict=True) if need]
            for mine, grad in zip(given, incoming, strict=True):
                mine.data.copy_(grad)
            backward.replay()
            return tuple(None if grad is None else grad.detach() for grad in found)

    parameters = surface[len(surface) - len([t for t in surface if isinstance(t, nn.Parameter)]) :]

    def run(*args: Any) -> Any:
        return pytree.tree_unflatten(_Graphed.apply(*pytree.tree_leaves(args), *parameters), spec)

    return run


@contextmanager
def graphs_on_cpus() -> Iterator[None]:
    """Let `compile.cuda_graphs` capture the layers of CPU ranks; a GPU has graphs."""
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda, "make_graphed_callables", make_graphed_callables),
        mock.patch.object(run_setup, "graphs_on", return_value=True),
    ):
        yield
