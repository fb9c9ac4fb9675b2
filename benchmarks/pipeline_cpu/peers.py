"""What pipemega is compared with.  Each function builds a trainer: step number -> mean loss.

The loss is None on a rank that does not learn it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

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
    """What a rank is told: who it is, and how many layers (embedding included) stage 0 holds."""

    rank: int
    world_size: int
    split: int


def _adamw(sizes: Sizes, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        module.parameters(), lr=sizes.lr, weight_decay=sizes.weight_decay, fused=True
    )


def one_process(sizes: Sizes, place: Place) -> Step:
    """The whole model in this process, micro-batch after micro-batch; talks to nobody."""
    model = build_layers(sizes, 0, sizes.num_units)
    optimizer = _adamw(sizes, model)

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


def torch_1f1b(sizes: Sizes, place: Place) -> Step:
    """torch.distributed.pipelining, one forward one backward."""
    return _torch_pipelining(sizes, place, Schedule1F1B)


def torch_gpipe(sizes: Sizes, place: Place) -> Step:
    """torch.distributed.pipelining, all forwards first."""
    return _torch_pipelining(sizes, place, ScheduleGPipe)


def _torch_pipelining(
    sizes: Sizes, place: Place, schedule_type: type[Schedule1F1B] | type[ScheduleGPipe]
) -> Step:
    is_first, is_last = place.rank == 0, place.rank == place.world_size - 1
    assert place.world_size == 2, "the split cuts the model in two"
    module = build_layers(
        sizes, 0 if is_first else place.split, place.split if is_first else sizes.num_units
    )
    stage = PipelineStage(module, place.rank, place.world_size, torch.device("cpu"))
    schedule = schedule_type(stage, sizes.num_microbatches, loss_fn=loss_fn)
    optimizer = _adamw(sizes, module)

    def step(number: int) -> float | None:
        inputs, labels = batch(sizes, number)
        losses: list[torch.Tensor] = []
        # The outputs of the whole step would be kept: 134 MB of logits that nobody asked for.
        if is_last:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            schedule.step(inputs, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if is_last else None

    return step


def deepspeed_1f1b(sizes: Sizes, place: Place) -> Step:
    """DeepSpeed's PipelineEngine; needs the package, and its own two-rank world."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    # Two specs for two stages: DeepSpeed has no partition that is given as numbers.
    module = PipelineModule(
        [
            LayerSpec(_Part, sizes, 0, place.split),
            LayerSpec(_Part, sizes, place.split, sizes.num_units),
        ],
        num_stages=place.world_size,
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=_adamw(sizes, module),
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
    """Layers start to stop - 1, drawn when DeepSpeed builds them: on the rank that holds them."""

    def __init__(self, sizes: Sizes, start: int, stop: int) -> None:
        super().__init__()
        self.layers = build_layers(sizes, start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output
