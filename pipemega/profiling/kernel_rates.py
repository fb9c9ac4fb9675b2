"""A fixed table of rates: FLOPs and bytes of a kernel -> seconds.

Models are cut by these times. They depend on the config alone, not on the machine: the same config
has the same cut in `pipemega plan` on a laptop and in every run. Only ratios of the times of layers
matter, so a faster device of the same kind needs no other table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten


@dataclass(frozen=True)
class KernelRates:
    """Rates that kernels of common sizes reach.

    Args:
        flops: FLOP/s of matrix products.
        bandwidth: bytes/s that all other work reads and writes.
        launch: seconds of a kernel without work.
    """

    flops: float
    bandwidth: float
    launch: float

    def seconds(self, flops: float, size: float) -> float:
        """Return the seconds of a kernel with `flops` that reads and writes `size` bytes."""
        return max(flops / self.flops, size / self.bandwidth) + self.launch


# Measured on one core of an AMD EPYC; fp32 and fp64 runs are CPU runs.
_FULL: Final = KernelRates(flops=50e9, bandwidth=8e9, launch=5e-6)
# What kernels of an H100 reach: 50 % of its FLOP/s, 75 % of its bandwidth.
_HALF: Final = KernelRates(flops=500e12, bandwidth=2.5e12, launch=4e-6)


def rates_for(dtype: str | None) -> KernelRates:
    """Return the rates of a run that computes in `dtype`: "fp16", "bf16", or others."""
    return _HALF if dtype in ("float16", "bfloat16") else _FULL


# They allocate memory or change its description, and run no kernel.
_NO_KERNEL = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
) | {_aten._unsafe_view, _aten.detach}


def runs_kernel(func: Any) -> bool:
    """Return whether an operation that a TorchDispatchMode sees runs a kernel."""
    return not func.is_view and func._overloadpacket not in _NO_KERNEL


def bytes_moved(*trees: Any) -> int:
    """Return the bytes of all tensors in arguments and results: what a kernel reads and writes."""
    return sum(_sizes(pytree.tree_leaves(trees)))


def _sizes(leaves: Iterable[Any]) -> Iterable[int]:
    return (leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
