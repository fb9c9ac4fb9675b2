"""The pipeline schedules of Megatron-core on the CPU; needs the package.

Only the schedule, its messages and its release of outputs are Megatron's. Modules, data, cut and
optimizer are the same as in the other systems.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline_cpu.cut import layer_bounds
from benchmarks.pipeline_cpu.model import Sizes, build_layers, loss_fn, micro_batches
from benchmarks.pipeline_cpu.peers import Place, Step, adamw

# Name -> rank of each stage.
MEGATRON_SCHEDULES = {"1f1b": (0, 1), "interleaved": (0, 1, 0, 1)}


def megatron(sizes: Sizes, place: Place, name: str) -> Step:
    """Megatron's 1F1B, or its interleaved 1F1B with two model chunks per rank.

    The settings are taken from Megatron's training script: outputs are deallocated once they are
    sent, and messages overlap with computation under the interleaved schedule only.
    """
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    rank_of_stage = MEGATRON_SCHEDULES[name]
    assert place.world_size == 2, "the placements are for two ranks"
    interleaved = name == "interleaved"
    chunks = len(rank_of_stage) // place.world_size if interleaved else None
    _redirect_cuda_to_cpu()
    if interleaved:
        _keep_storage_while_sent()
    parallel_state.initialize_model_parallel(1, place.world_size, chunks)
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        pipeline_model_parallel_size=place.world_size,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )
    bounds = layer_bounds(sizes, rank_of_stage, place.split)
    stages = [
        _Stage(
            build_layers(sizes, bounds[stage], bounds[stage + 1]),
            config,
            ModelType.encoder_or_decoder,
        )
        for stage, rank in enumerate(rank_of_stage)
        if rank == place.rank
    ]
    optimizer = adamw(sizes, nn.ModuleList(stages))
    schedule = get_forward_backward_func()

    def step(number: int) -> float | None:
        losses = schedule(
            forward_step_func=_forward_step,
            data_iterator=[iter(micro_batches(sizes, number)) for _ in stages],
            model=stages,
            num_microbatches=sizes.num_microbatches,
            # Megatron sends [seq, batch, hidden]; the modules here have [batch, seq, hidden].
            seq_length=sizes.micro_batch,
            micro_batch_size=sizes.seq,
        )
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / len(losses) if losses else None

    return step


class _Stage(nn.Module):
    """Layers with the attributes that Megatron's schedules need."""

    def __init__(self, layers: nn.Module, config: Any, model_type: Any) -> None:
        super().__init__()
        self.layers = layers
        self.config = config
        self.model_type = model_type
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Set what the previous stage sent; None on the first stage."""
        (self._received,) = tensors

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        received, self._received = self._received, None
        output: torch.Tensor = self.layers(ids if received is None else received)
        return output


def _forward_step(
    data: Iterator[tuple[torch.Tensor, torch.Tensor]], stage: nn.Module
) -> tuple[torch.Tensor, Any]:
    """Return the output of a stage, and the function that the last stage calls with it."""
    inputs, labels = next(data)
    return stage(inputs), partial(_loss, labels)


def _loss(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, float]:
    loss = loss_fn(logits, labels)
    return loss, loss.item()


def _redirect_cuda_to_cpu() -> None:
    """Redirect the calls for CUDA of Megatron's schedules; nothing else here uses CUDA."""
    zeros = torch.zeros
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    torch.zeros = lambda *size, **options: zeros(*size, **(options | {"device": "cpu"}))


def _keep_storage_while_sent() -> None:
    """Let gloo read a tensor that Megatron deallocates before its overlapped send has finished."""
    isend = dist.isend
    # The detached tensor keeps the storage when Megatron replaces the data of the other.
    dist.isend = lambda tensor, **options: isend(tensor.detach(), **options)
