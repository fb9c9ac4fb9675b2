"""How many bytes of tensors are alive, and how much arithmetic was done, operation by operation.

Works on every device, the meta device among them, where tensors have a size and no memory: so what
a stage keeps between its forward and its backward is counted by running it, not by a formula.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# torch has no formula for the CPU's attention, which is that of the others.
_FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, counts the storages that operations make, until each is let go, and FLOPs.

    A storage counts once, however many tensors look at it. What a kernel makes and drops inside
    itself is not seen. FLOPs are those of matrix products, by torch's formulas; of a causal
    attention half of them, as `monitor.flops` counts it.

    Args:
        ignoring: tensors that were there before, whose storages do not count.
    """

    def __init__(self, ignoring: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """The most that were alive since the last `restart`."""
        self.flops = 0.0
        self._seen: dict[int, Any] = {}
        for tensor in ignoring:
            self._remember(tensor.untyped_storage(), counted=False)

    def restart(self) -> None:
        """Begins a new peak, at what is alive now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._remember(storage, counted=True)
        packet = func._overloadpacket
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            done = formula(*args, **kwargs, out_val=result)
            self.flops += done / 2 if _is_causal(func, args, kwargs) else done
        return result

    def _remember(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0

        def forget(_: Any) -> None:
            self._seen.pop(key, None)
            self.now -= size

        # torch keeps the Python object of a storage for as long as the storage itself.
        self._seen[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))
