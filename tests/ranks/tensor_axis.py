"""The tensor axis under test, and the comparison with the unsplit model that all tests share."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.mesh import Axis, build_mesh
from pipemega.parameters import shard_of
from pipemega.topology import Topology

ALONE = Axis("tensor")


def tensor_axis() -> Axis:
    """All ranks of the pool as tensor ranks; one rank where no pool runs."""
    if not dist.is_initialized():
        return ALONE
    return build_mesh(Topology(tensor=dist.get_world_size()), torch.device("cpu")).tensor


def on_ranks(pool, ranks, function, *args):
    """`function(*args)` on so many tensor ranks; one needs no pool."""
    return [function(*args)] if ranks == 1 else pool.run(ranks, function, *args)


def part(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's even slice."""
    return whole.chunk(axis.size, dim)[axis.rank]


def close(ours: Tensor, theirs: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def fill(module: nn.Module, unsplit: nn.Module) -> None:
    """Gives each parameter of `module` its part of the one that has its name in `unsplit`."""
    for name, parameter in module.named_parameters():
        shard_of(parameter).take(unsplit.get_parameter(name), parameter.data)


def compare_gradients(module: nn.Module, unsplit: nn.Module, axis: Axis) -> None:
    """Each rank's gradient is its part of the unsplit model's, padding 0."""
    for name, parameter in module.named_parameters():
        shard, gradient = shard_of(parameter), parameter.grad
        if shard.partial_gradient:
            dist.all_reduce(gradient, group=axis.group)
        wanted = torch.full_like(parameter, torch.nan)
        shard.take(unsplit.get_parameter(name).grad, wanted)
        close(gradient, wanted)
