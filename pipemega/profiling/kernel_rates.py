"""A fixed table of rates: FLOPs and bytes of a kernel -> seconds.

Models are cut by these times. They depend on the config alone, not on the machine: the same config
has the same cut in `pipemega plan` on a laptop and in every run. Only ratios of the times of layers
matter, so a faster device of the same kind needs no other table.
"""

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
        products: FLOP/s of matrix products.
        attention: FLOP/s of fused attention; a causal one has half of the FLOPs.
        bandwidth: bytes/s that all other work reads and writes.
        streams: the same for sums, differences, products and copies of large tensors.
        launch: seconds of a kernel without work.
        instruction: seconds of an F, I, W or B beyond its kernels and messages.
        messages: bytes/s at which ranks handle messages.
    """

    products: float
    attention: float
    bandwidth: float
    streams: float
    launch: float
    instruction: float
    messages: float

    def seconds(self, func: Any, flops: float, size: float) -> float:
        """Return the seconds of operation `func` with `flops` that moves `size` bytes."""
        rate = self.attention if "attention" in func._schema.name else self.products
        streams = func._overloadpacket in _STREAMS
        return max(flops / rate, size / (self.streams if streams else self.bandwidth)) + self.launch


# Measured on one of two busy cores of an AMD EPYC, by benchmarks/pipeline_cpu; fp32 and fp64 runs
# are taken for CPU runs. The attention of the CPU computes the masked half too. With four stages
# per rank instead of one, a rank works about 1 ms longer for each further instruction, half of it
# with messages of 0.5 MB.
_FULL: Final = KernelRates(
    products=115e9,
    attention=22e9,
    bandwidth=16e9,
    streams=48e9,
    launch=4e-6,
    instruction=3e-4,
    messages=1e9,
)
# What kernels of an H100 reach in bf16: about half of its FLOP/s, 3/4 of its bandwidth.
_HALF: Final = KernelRates(
    products=500e12,
    attention=300e12,
    bandwidth=2.5e12,
    streams=2.5e12,
    launch=4e-6,
    instruction=5e-5,
    messages=1e11,
)


def rates_for(dtype: str | None) -> KernelRates:
    """Return the rates of a run that computes in `dtype`: "fp16", "bf16", or others."""
    return _HALF if dtype in ("float16", "bfloat16") else _FULL


# They allocate memory or change its description, and run no kernel.
_NO_KERNEL = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
) | {_aten._unsafe_view, _aten.detach}


# Simple arithmetic: the speed of the memory limits them on every device.
_STREAMS = frozenset(
    (_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.mul, _aten.mul_, _aten.copy_, _aten.clone)
) | {_aten.zero_, _aten.zeros_like, _aten.new_zeros, _aten.zeros, _aten.fill_}


def runs_kernel(func: Any) -> bool:
    """Return whether an operation that a TorchDispatchMode sees runs a kernel."""
    return not func.is_view and func._overloadpacket not in _NO_KERNEL


# They read some rows of their first tensor, or add to some rows of it: as many bytes as their other
# tensors have, or their result.
_SPARSE = frozenset((_aten.embedding, _aten.index_select, _aten.gather, _aten.index))
_SPARSE_IN_PLACE = frozenset((_aten.index_add_, _aten.index_put_, _aten.scatter_add_))


def bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes: its arguments and results."""
    if func._overloadpacket in _SPARSE:
        return _bytes(args[1:], kwargs) + 2 * _bytes(result)
    if func._overloadpacket in _SPARSE_IN_PLACE:
        return 3 * _bytes(args[1:], kwargs)
    return _bytes(args, kwargs, result)


def _bytes(*trees: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor))
