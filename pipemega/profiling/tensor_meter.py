"""Counts the bytes of live tensors and the FLOPs, operation by operation.

Works on every device, including the meta device, where tensors have a size but no memory. So the
memory of a stage between forward and backward is counted by running it, not by a formula.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from pipemega.optimizer.eager_torch import without_dynamo
from pipemega.profiling.kernel_rates import KernelRates, bytes_moved, runs_kernel
from pipemega.profiling.meta_results import run_operation
from pipemega.profiling.python_meta_kernels import protected_functions

_aten = torch.ops.aten
# torch has no FLOP formula for the CPU attention kernel; it does the same work as the CUDA kernel.
_FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts FLOPs and the bytes of all storages that operations allocate.

    A storage counts once, even if several tensors share it, and until it is freed. Temporary memory
    inside a kernel is not counted. FLOPs are those of matrix products, by torch's formulas; a
    causal attention counts half, as in `monitor.flops`.

    Args:
        ignoring: existing tensors, whose storages do not count.
        rates: convert FLOPs and bytes to `seconds`; None: seconds are not counted.
    """

    def __init__(self, ignoring: Iterable[Tensor] = (), rates: KernelRates | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes of all live storages."""
        self.peak = 0
        """Maximum of `now` since the last `reset_peak`."""
        self.flops = 0.0
        self.kernels = 0
        """Number of operations that run a kernel: all but views."""
        self.seconds = 0.0
        """Time of all kernels by `rates`."""
        self._rates = rates
        self._seen: dict[int, Any] = {}
        for tensor in ignoring:
            self._track(tensor.untyped_storage(), counted=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps `__torch_dispatch__` in `torch._dynamo.disable`, and imports it.
        return False

    def reset_peak(self) -> None:
        """Set the peak to the current bytes."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = run_operation(func, args, kwargs)
        # Otherwise a TorchFunctionMode sees each attribute of a tensor that is read.
        with torch._C.DisableTorchFunction():
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._track(storage, counted=True)
        self.kernels += not func.is_view
        flops = operation_flops(func, args, kwargs, result)
        self.flops += flops
        if self._rates is not None and runs_kernel(func):
            self.seconds += self._rates.seconds(
                func, flops, bytes_moved(func, args, kwargs, result)
            )

    def _track(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0

        def forget(_: Any) -> None:
            self._seen.pop(key, None)
            self.now -= size

        # torch keeps the Python object of a storage alive as long as the storage.
        self._seen[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def unmetered() -> Iterator[None]:
    """Context whose operations no enclosing TensorMeter counts, and that imports no torch._dynamo.

    For models on the meta device that a run builds to count them: they need no memory, and belong
    to no step.
    """
    with _disable_current_modes(), without_dynamo(protected_functions()):
        yield


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the FLOPs of an operation that a TorchDispatchMode sees; see `TensorMeter`."""
    packet = func._overloadpacket
    formula = _FORMULAS.get(packet) or flop_registry.get(packet) or _of_functional(packet)
    if formula is None:
        return 0.0
    if packet.__name__.startswith("_scaled_dot_product"):
        args = _with_all_heads(func, args)
    flops: float = formula(*args, **kwargs, out_val=result)
    return flops / 2 if _is_causal(func, args, kwargs) else flops


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the shapes of keys and values as if each query had its own.

    The formulas of torch 2.12 and older refuse grouped queries; the products are the same.
    """
    names = [argument.name for argument in func._schema.arguments]
    heads = args[names.index("query")].shape[1]
    return tuple(
        torch.Size((arg.shape[0], heads, *arg.shape[2:])) if name in ("key", "value") else arg
        for name, arg in zip(names, args, strict=False)
    )


def _of_functional(packet: Any) -> Any:
    """Return the formula of `addmm` for `addmm_`: torch has none for operations in place."""
    name: str = packet.__name__
    functional = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    return flop_registry.get(functional)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))
