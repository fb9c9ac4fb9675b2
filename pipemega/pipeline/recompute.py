"""Activation checkpointing: forget what lies between, compute it again when backward needs it.

Source: Chen et al. 2016, arXiv:1604.06174.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Any], *args: Any, restore_rng: bool = True) -> Any:
    """`function(*args)`, keeping only `args`; the rest is computed again in backward.

    The second run stops as soon as it has what backward needs. Without gradients it is a plain
    call.

    Args:
        restore_rng: run the second time with the random numbers of the first; False where the
            function seeds itself, or draws none.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=restore_rng)
