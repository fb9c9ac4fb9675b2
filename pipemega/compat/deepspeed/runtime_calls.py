"""`deepspeed.runtime.utils`: what scripts use of it."""

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from pipemega.distributed.mesh import launched_rank
from pipemega.monitor import get_logger
from pipemega.pipeline.plan import partition


def set_random_seed(seed: int) -> None:
    """Seed torch, numpy and `random`."""
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device on rank 0, if `force` is set."""
    if not force or launched_rank() != 0:
        return
    used = "the model is on the CPU"
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        used = f"{now / 2**30:.2f} GiB allocated, {most / 2**30:.2f} GiB at most"
    get_logger().info(f"{message}: {used}")


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` runs of items with (almost) as many items."""
    return partition.uniform(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` runs of items with the lowest largest weight."""
    return partition.partition(weights, num_parts)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call."""
    parts = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)
