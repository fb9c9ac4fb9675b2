"""Layers that are cut over tensor ranks and marked as Megatron marks them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed
from pipemega.compat.deepspeed.process_topology import PipeModelDataParallelTopology
from pipemega.errors import CheckpointError
from tests.ranks.compat.deepspeed_scripts import WIDTH, ds_config

RANKS = 2
HIDDEN = 8


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ParallelMLP(nn.Module):
    """A column-parallel and a row-parallel linear, and a bias that all tensor ranks have."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.up = nn.Parameter(_whole(1, HIDDEN, WIDTH).chunk(RANKS, 0)[rank].clone())
        self.down = nn.Parameter(_whole(2, WIDTH, HIDDEN).chunk(RANKS, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for parameter, dim in ((self.up, 0), (self.down, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(_Copy.apply(x) @ self.up.t())
        return _Reduce.apply(hidden @ self.down.t()) + self.bias


def _whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def micro_batch(seed: int) -> tuple[Tensor, Tensor]:
    return _whole(seed, 2, WIDTH), _whole(seed + 100, 2, WIDTH)


def tensor_parallel_states() -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps on two tensor ranks; return the norms and the whole parameters."""
    torch.set_default_dtype(torch.float64)
    deepspeed.init_distributed()
    net = deepspeed.pipe.PipelineModule(
        [deepspeed.pipe.LayerSpec(ParallelMLP), torch.tanh],
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=RANKS, num_dp=1),
        loss_fn=nn.functional.mse_loss,
    )
    engine, *_ = deepspeed.initialize(model=net, config=ds_config())
    norms = []
    for step in range(2):
        engine.train_batch(iter([micro_batch(10 * step + m) for m in range(4)]))
        norms.append(engine.get_global_grad_norm())
    return norms, engine.parameter_state()


def unsplit_tensors() -> tuple[list[float], dict[str, Tensor]]:
    """Train the same steps with whole matrices in one process."""
    torch.set_default_dtype(torch.float64)
    try:
        up, down = _whole(1, HIDDEN, WIDTH), _whole(2, WIDTH, HIDDEN)
        parameters = [nn.Parameter(p) for p in (up, down, torch.zeros(WIDTH))]
        optimizer, norms = torch.optim.SGD(parameters, lr=0.1), []
        for step in range(2):
            for m in range(4):
                x, y = micro_batch(10 * step + m)
                hidden = torch.tanh(x @ parameters[0].t()) @ parameters[1].t() + parameters[2]
                (nn.functional.mse_loss(torch.tanh(hidden), y) / 4).backward()
            norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    names = [f"layers.0.{name}" for name in ("up", "down", "bias")]
    return norms, dict(zip(names, (p.detach() for p in parameters), strict=True))


def loaded_from_deepspeed(folder: str) -> tuple[list[Tensor], str]:
    """Load a checkpoint on two tensor ranks; return this rank's weights, and the error if any."""
    torch.set_default_dtype(torch.float64)
    deepspeed.init_distributed()
    net = deepspeed.pipe.PipelineModule(
        [deepspeed.pipe.LayerSpec(ParallelMLP), torch.tanh],
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=RANKS, num_dp=1),
        loss_fn=nn.functional.mse_loss,
    )
    engine, *_ = deepspeed.initialize(model=net, config=ds_config())
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return [], str(error)
    return [parameter.detach() for parameter in net.parameters()], ""
