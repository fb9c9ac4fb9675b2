"""Runs of a transformers model on the meta device, for plans.

transformers reads values to choose masks, such as whether the positions contain several documents.
Tensors on the meta device have none. So the model is run on the CPU first, without its layers and
with zeros as inputs; the run on the meta device then gets the values that the first one has read.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

# Functions that return a value of a tensor to Python.
_READS = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__,
    Tensor.item, Tensor.tolist, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose,
)  # fmt: skip


class _RecordReads(TorchFunctionMode):
    """Keeps the values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.values: deque[Any] = deque()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _READS:
            self.values.append(result)
        return result


class _ReplayReads(TorchFunctionMode):
    """Returns these values, in order, to those who read meta tensors."""

    def __init__(self, values: deque[Any]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and args[0].is_meta and self._values:
            return self._values.popleft()
        return func(*args, **(kwargs or {}))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run on the CPU, unseen by the meters of a plan."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


def zeros_on_cpu(tree: Any) -> Any:
    """Return the tree with zeros on the CPU, which use no memory; masks are ones."""

    def values(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_mask = "mask" in pytree.keystr(path)
        fill = torch.ones if is_mask else torch.zeros
        return fill((), dtype=leaf.dtype, device="cpu").expand(leaf.shape)

    return pytree.tree_map_with_path(values, tree)


def run_on_meta(run: Callable[[], Any], run_on_cpu: Callable[[], Any]) -> Any:
    """Return `run()` with the values that `run_on_cpu` reads."""
    with on_cpu(), _RecordReads() as record:
        run_on_cpu()
    with _ReplayReads(record.values):
        return run()
