"""What comes out of a run of a plan: sums of losses, outputs; and runs that train nothing."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.mesh import Mesh
from pipemega.pipeline.executor import Executor, MicroBatches, Results
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.schedules import forward_only
from pipemega.random import preserve_rng


def totals(results: Results, mesh: Mesh) -> tuple[Tensor | float, Tensor | float, int]:
    """Sums over this rank's micro-batches: losses, weights, number; each counted once."""
    if not results.losses or mesh.tensor.rank > 0:
        return 0.0, 0.0, 0
    # In the order of micro-batches, whatever the schedule was.
    order = sorted(results.losses)
    losses = torch.stack([results.losses[m].double() for m in order]).sum()
    weights = torch.stack([results.weights[m].double() for m in order]).sum()
    return losses, weights, len(order)


def forward(
    executor: Executor,
    rank_of_stage: Sequence[int],
    inputs: Sequence[Any],
    labels: Sequence[Any],
    mesh: Mesh,
    keep_outputs: bool,
) -> Results:
    """Runs the forwards of some micro-batches, without gradients; collective."""
    plan = lower(forward_only(rank_of_stage, max(len(inputs), len(labels))))
    with preserve_rng(mesh.device):
        return executor.run(plan, MicroBatches(inputs, labels, keep_outputs=keep_outputs))


def mean_loss(results: Results, mesh: Mesh) -> float:
    """By weight, over the micro-batches of all data ranks; collective, the same on every rank."""
    loss, weight, _ = totals(results, mesh)
    sums = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in (loss, weight)])
    sums = sums.to(mesh.device)
    if mesh.world.size > 1:
        dist.all_reduce(sums, group=mesh.world.group)
    total, of = sums.tolist()
    return total / of if of else float("nan")


def outputs_of(results: Results, is_last: bool) -> list[Any] | None:
    """What the last layer gave for each micro-batch, on the ranks of the last stage."""
    return [results.outputs[m] for m in sorted(results.outputs)] if is_last else None
