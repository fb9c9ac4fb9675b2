"""The compared systems, each configured for low memory.

Each function returns a `Build`: a function without arguments that builds the model and returns
step number -> None, which trains one step. Imports happen before `Build` is called.

    zero-redundancy     torch's DistributedDataParallel and ZeroRedundancyOptimizer
    fsdp2               torch's fully_shard on each layer and on the whole model: weights, gradients
                        and state are sharded; weights are gathered for each micro-batch and freed
                        after each use (`reshard`), or kept from forward to backward (`keep`)
    pipemega            ZeRO stage 1; 2x4 is pipeline 2, data 4
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory.config import config_of
from benchmarks.pipeline_cpu.model import Sizes, build_layers, loss_fn, micro_batches

Step = Callable[[int], None]


Build = Callable[[], Step]


def prepare(system: str, sizes: Sizes, dtype: str) -> Build:
    """Return the builder of `system`: a name of `SYSTEMS`, with options after a colon."""
    name, _, kind = system.partition(":")
    return SYSTEMS[name](sizes, dtype, kind)


def zero_redundancy(sizes: Sizes, dtype: str, kind: str) -> Build:
    return partial(_zero_redundancy, sizes, dtype)


def _zero_redundancy(sizes: Sizes, dtype: str) -> Step:
    """Build the trainer: gradients are views of the buckets; bf16 is autocast with fp32 weights."""
    net = build_layers(sizes, 0, sizes.num_units)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=sizes.lr,
        weight_decay=sizes.weight_decay,
        fused=True,
    )

    def step(number: int) -> None:
        mine = _of_this_rank(sizes, number)
        for place, (inputs, labels) in enumerate(mine):
            model.require_backward_grad_sync = place == len(mine) - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = loss_fn(model(inputs), labels)
            (loss / len(mine)).backward()
        optimizer.step()
        # Not to None: the buckets stay allocated.
        optimizer.zero_grad(set_to_none=False)

    return step


def fsdp2(sizes: Sizes, dtype: str, kind: str) -> Build:
    return partial(_fsdp2, sizes, dtype, reshard=kind == "reshard")


def _fsdp2(sizes: Sizes, dtype: str, *, reshard: bool) -> Step:
    """Build the trainer: each micro-batch reduces its gradients directly to the shards."""
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = []
    for index in range(sizes.num_units):
        # One at a time, so that no rank holds the whole model.
        layer = build_layers(sizes, index, index + 1)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        layers.append(layer)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=sizes.lr, weight_decay=sizes.weight_decay, fused=True
    )

    def step(number: int) -> None:
        mine = _of_this_rank(sizes, number)
        for inputs, labels in mine:
            (loss_fn(model(inputs).float(), labels) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipemega(sizes: Sizes, dtype: str, kind: str) -> Build:
    """Partition by parameters; `kind` is "PxD" or "PxD/SCHEDULE"."""
    # Imported here, so that pipemega is not in the processes of the other systems.
    from pipemega import initialize, load_config
    from pipemega.models import GPTConfig, gpt

    logging.getLogger("pipemega").setLevel(logging.WARNING)
    config = load_config(config_of(sizes, dtype, kind))
    net = gpt(GPTConfig.of(config, sizes.vocab))

    def build() -> Step:
        engine, *_ = initialize(net, config)
        ranks, rank = engine.mesh.data.size, engine.mesh.data.rank

        def step(number: int) -> None:
            engine.train_batch(iter(micro_batches(sizes, number)[rank::ranks]))

        return step

    return build


def _of_this_rank(sizes: Sizes, number: int) -> list[Any]:
    return micro_batches(sizes, number)[dist.get_rank() :: dist.get_world_size()]


SYSTEMS: dict[str, Callable[[Sizes, str, str], Build]] = {
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "pipemega": pipemega,
}
