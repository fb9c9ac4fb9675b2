"""The sums of the loss over micro-batches and ranks."""

import torch
from torch import Tensor

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Mesh
from pipemega.pipeline.execution_state import Results


def sum_losses(results: Results, mesh: Mesh) -> tuple[Tensor | float, Tensor | float, int]:
    """Sum over this rank's micro-batches: (losses, weights, number of micro-batches).

    Zeros except on the first tensor rank of the last stage, so that sums over all ranks count each
    micro-batch once.
    """
    if not results.losses or mesh.tensor.rank > 0:
        return 0.0, 0.0, 0
    # In the order of micro-batches: every schedule gives the same sum.
    order = sorted(results.losses)
    losses = torch.stack([results.losses[m].double() for m in order]).sum()
    weights = torch.stack([results.weights[m].double() for m in order]).sum()
    return losses, weights, len(order)


def mean_of_sums(loss: Tensor | float, weight: Tensor | float, mesh: Mesh) -> float:
    """Return the loss summed over all ranks, divided by the weight; collective."""
    sums = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in (loss, weight)])
    sums = sums.to(mesh.device)
    if mesh.world.size > 1:
        all_reduce(sums, mesh.world)
    synchronize()
    loss_sum, weight_sum = sums.tolist()
    return loss_sum / weight_sum if weight_sum else float("nan")
