"""What differs between the versions of torch that setup.py allows.

torch   what it has, and what an older one uses instead
2.9     the function of `use_expandable_segments`: its name before
2.11    edges that keep the graph of a custom autograd function; 2.8 does not, 2.9 and 2.10 were not
        looked at: `gradient_edge` makes a view
2.13    `all_gather_single`, `reduce_scatter_single`, and the methods `..._coalesced` of a group:
        the names before, about which torch 2.13 warns; products of symmetric memory without a
        registration of the group: products in pieces
2.14    `set_timeout`: the name before, about which torch 2.14 warns

Features of the config without a substitute are refused: `too_old`.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipemega.errors import ConfigError

# What has no substitute, and the first version of torch that has it.
_FIRST = {"optimizer.type 'Muon'": "2.9"}

_is_single = hasattr(dist, "all_gather_single")
all_gather_single = dist.all_gather_single if _is_single else dist.all_gather_into_tensor
reduce_scatter_single = dist.reduce_scatter_single if _is_single else dist.reduce_scatter_tensor
# Names of methods of a process group.
ALL_GATHERS = "all_gather_single_coalesced" if _is_single else "allgather_into_tensor_coalesced"
REDUCE_SCATTERS = (
    "reduce_scatter_single_coalesced" if _is_single else "reduce_scatter_tensor_coalesced"
)

# `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` are called as in torch 2.13.
HAS_SYMMETRIC_PRODUCTS = _is_single

set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)

_edges_own_graphs = "ownership_token" in GradientEdge._fields


def too_old(feature: str) -> ConfigError:
    """Return the error for a feature of the config, named as in `_FIRST`."""
    return ConfigError(
        f"{feature} needs torch {_FIRST[feature]} or newer, and this is torch {torch.__version__}: "
        f"install a newer torch, or do not use it",
        on_every_rank=True,
    )


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, unless the user has configured it.

    Else, when memory is short, it frees segments, and waits for the device: also for a receive that
    was posted early.
    """
    configured = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if configured or torch.version.hip is not None:
        return
    name = "_accelerator_setAllocatorSettings"
    older = "_cuda_cudaCachingAllocator_set_allocator_settings"
    set_allocator: Any = getattr(torch._C, name, None) or getattr(torch._C, older)
    set_allocator("expandable_segments:True")


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge of a tensor that requires gradients; it keeps the graph behind it.

    torch 2.8 and older free the node of a custom function when no tensor and no other node has it.
    """
    node: Any = tensor.grad_fn
    if not _edges_own_graphs and isinstance(node, torch._C._FunctionBase):
        tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)
