"""What a DeepSpeed script calls before it builds a model: arguments, and the process group."""

import argparse
import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pipemega.distributed.mesh import DEFAULT_TIMEOUT, launched_world_size, pick_device
from pipemega.distributed.process_groups import checked_launch, connect_ranks
from pipemega.monitor import get_logger

# What scripts compare: the version whose interface this package has.
DEEPSPEED_VERSION: Final = "0.19.8"
# `--set` of `python -m pipemega.compat.deepspeed`: KEY=VALUE, for each config of the script.
CONFIG_CHANGES: Final[list[str]] = []


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of DeepSpeed's launch lines; `initialize(args=...)` reads deepspeed_config.

    Options that the parser has already are kept.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    known = parser._option_string_actions

    def add(name: str, **options: Any) -> None:
        if name not in known:
            group.add_argument(name, **options)

    add("--deepspeed", action="store_true", help="a flag for the script; no effect on the engine")
    add("--deepspeed_config", type=str, default=None, help="the JSON file")
    add("--deepscale", action="store_true", help=argparse.SUPPRESS)
    add("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Connect the launched ranks, unless torch.distributed is initialized.  Collective.

    Works under torchrun, srun and mpirun, and in one process. As DeepSpeed does, it sets RANK,
    LOCAL_RANK and torchrun's other variables if srun or mpirun has started the ranks.

    Args:
        dist_backend: ignored but for a warning: the ranks use NCCL and gloo on GPUs, gloo on CPUs.
        timeout: of each wait; None: that of `mesh.timeout_seconds`.
        init_method, rank, world_size: as for torch.distributed.init_process_group.
        dist_init_required: False: the caller has initialized torch.distributed.
        auto_mpi_discovery, distributed_port, verbose, config: have no effect here.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    device = pick_device("auto")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = DEFAULT_TIMEOUT if timeout is None else timeout
    given: dict[str, Any] = {"init_method": init_method, "rank": rank, "world_size": world_size}
    if init_method is None and rank < 0:
        os.environ |= checked_launch().values
        if launched_world_size() > 1:
            connect_ranks(backend, wait)
        given = {"store": HashStore(), "rank": 0, "world_size": 1}
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=wait, **given)
    if dist_backend not in (None, "gloo", "nccl"):
        text = f"dist_backend {dist_backend!r} is not used: the backend is {backend}"
        get_logger(dist.get_rank()).info(text)
