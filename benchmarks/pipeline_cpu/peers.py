"""The other systems. Each function builds a trainer: step number -> mean loss.

The loss is None on ranks without the last stage.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.pipeline_cpu.cut import layer_bounds
from benchmarks.pipeline_cpu.model import (
    Sizes,
    batch,
    build_layers,
    loss_fn,
    micro_batches,
)

Step = Callable[[int], float | None]


@dataclass(frozen=True)
class Place:
    """Rank, number of ranks, and number of blocks on the first of two stages."""

    rank: int
    world_size: int
    split: int


def adamw(sizes: Sizes, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all systems but pipemega."""
    return torch.optim.AdamW(
        module.parameters(), lr=sizes.lr, weight_decay=sizes.weight_decay, fused=True
    )


def one_process(sizes: Sizes, place: Place) -> Step:
    """Train the whole model in this process, without communication."""
    model = build_layers(sizes, 0, sizes.num_units)
    optimizer = adamw(sizes, model)

    def step(number: int) -> float:
        total = 0.0
        for inputs, labels in micro_batches(sizes, number):
            loss = loss_fn(model(inputs), labels) / sizes.num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


TORCH_SCHEDULES: dict[str, tuple[type[Any], tuple[int, ...]]] = {
    # name -> class, rank of each stage
    "gpipe": (schedules.ScheduleGPipe, (0, 1)),
    "1f1b": (schedules.Schedule1F1B, (0, 1)),
    "interleaved": (schedules.ScheduleInterleaved1F1B, (0, 1, 0, 1)),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, (0, 1, 0, 1)),
    "zb-v": (schedules.ScheduleZBVZeroBubble, (0, 1, 1, 0)),
}
if hasattr(schedules, "ScheduleDualPipeV"):  # not in torch 2.8
    TORCH_SCHEDULES["dualpipe-v"] = (schedules.ScheduleDualPipeV, (0, 1, 1, 0))


def torch_pipelining(sizes: Sizes, place: Place, name: str) -> Step:
    """torch.distributed.pipelining under one of its schedules."""
    schedule_type, rank_of_stage = TORCH_SCHEDULES[name]
    assert place.world_size == 2, "the placements are for two ranks"
    bounds = layer_bounds(sizes, rank_of_stage, place.split)
    here = [stage for stage, rank in enumerate(rank_of_stage) if rank == place.rank]
    last = len(rank_of_stage) - 1
    stages = [
        PipelineStage(
            build_layers(sizes, bounds[stage], bounds[stage + 1]),
            stage,
            len(rank_of_stage),
            torch.device("cpu"),
        )
        for stage in here
    ]
    schedule = schedule_type(
        stages[0] if len(rank_of_stage) == place.world_size else stages,
        sizes.num_microbatches,
        loss_fn=loss_fn,
    )
    optimizer = adamw(sizes, nn.ModuleList(stage.submod for stage in stages))

    def step(number: int) -> float | None:
        inputs, labels = batch(sizes, number)
        arguments = [inputs] if 0 in here else []
        target = labels if last in here else None
        losses: list[torch.Tensor] | None = [] if last in here else None
        # Otherwise torch keeps the outputs of the whole step: 134 MB of logits.
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return None if losses is None else sum(loss.item() for loss in losses) / len(losses)

    return step


def deepspeed_1f1b(sizes: Sizes, place: Place) -> Step:
    """DeepSpeed's PipelineEngine on two ranks; needs the package."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    # Two specs for two stages: DeepSpeed does not accept explicit stage bounds.
    module = PipelineModule(
        [
            LayerSpec(_Part, sizes, 0, place.split + 1),
            LayerSpec(_Part, sizes, place.split + 1, sizes.num_units),
        ],
        num_stages=place.world_size,
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=adamw(sizes, module),
        config={
            "train_micro_batch_size_per_gpu": sizes.micro_batch,
            "gradient_accumulation_steps": sizes.num_microbatches,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )

    def step(number: int) -> float:
        return float(engine.train_batch(iter(micro_batches(sizes, number))))

    return step


class _Part(nn.Module):
    """Layers start to stop - 1; DeepSpeed builds them on the rank that holds them."""

    def __init__(self, sizes: Sizes, start: int, stop: int) -> None:
        super().__init__()
        self.layers = build_layers(sizes, start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output
