"""The measured pipeline, in one process per rank; `rank.py` runs it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor, RankStages
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, RngKey, build_stages
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.pipeline.transport import Transport

WIDTH = 8


def make_plan(name: str, ranks: int, num_microbatches: int, ahead: int) -> Plan:
    """Return the plan of a schedule, with receives posted `ahead` compute steps early."""
    return lower(build_plan(name, ranks, num_microbatches), ahead)


def make_run(plan: Plan, layer: str = "scale") -> Callable[[], None]:
    """Return a function that runs `plan` on an executor built as in `initialize`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = PipelineModule([LayerSpec(_layer, layer) for _ in range(plan.num_stages)], loss_fn=_loss)
    build_options = BuildOptions(Axis("tensor"), torch.device("cpu"), seed=0)
    stages = build_stages(net, range(plan.num_stages + 1), plan.stages_of(rank), build_options)
    buffer = GradientBuffer([p for stage in stages.values() for p in stage.named_parameters()])
    weights = None
    if plan.splits_backward:
        weights = WeightGradQueue(buffer)
        enable_split_backward(stages.values(), weights)
    axis = Axis("pipeline", tuple(range(world)), rank, dist.new_group())
    transport = Transport(axis, plan.rank_of_stage, torch.device("cpu"))
    executor = Executor(
        RankStages(rank, stages, plan.num_stages, _loss), transport, weight_queue=weights
    )
    count = plan.num_microbatches
    batch = MicroBatches(
        [torch.ones(1, WIDTH) for _ in range(count)],
        [torch.ones(1, WIDTH) for _ in range(count)],
        rng_keys=[RngKey(0, 0, m) for m in range(count)],
        loss_factor=1 / count,
    )

    def run() -> None:
        executor.run(plan, batch)

    return run


class _Scale(nn.Module):
    """Multiplies x by a number: almost no computation, but an autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _layer(kind: str) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False) if kind == "linear" else _Scale()


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, labels)
