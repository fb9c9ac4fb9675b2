"""The tensor axis of a test, and the comparison with the unsharded model."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.parameters import shard_of

ALONE = Axis("tensor")


def tensor_axis() -> Axis:
    """Return an axis of all ranks of the pool; of one rank without a pool."""
    if not dist.is_initialized():
        return ALONE
    return build_mesh(Topology(tensor=dist.get_world_size()), torch.device("cpu")).tensor


def on_ranks(pool, ranks, function, *args):
    """Call `function(*args)` on each of `ranks` tensor ranks; one rank runs in this process."""
    return [function(*args)] if ranks == 1 else pool.run(ranks, function, *args)


def part(full: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's slice."""
    return full.chunk(axis.size, dim)[axis.rank]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def fill(module: nn.Module, unsharded: nn.Module) -> None:
    """Copy the shards of the parameters of `unsharded` to `module`."""
    for name, parameter in module.named_parameters():
        shard_of(parameter).copy_from_full(unsharded.get_parameter(name), parameter.data)


def compare_gradients(module: nn.Module, unsharded: nn.Module, axis: Axis) -> None:
    """Check that gradients are the shards of the gradients of `unsharded`, with padding 0."""
    for name, parameter in module.named_parameters():
        shard, gradient = shard_of(parameter), parameter.grad
        if shard.partial_gradient:
            dist.all_reduce(gradient, group=axis.group)
        expected = torch.full_like(parameter, torch.nan)
        shard.copy_from_full(unsharded.get_parameter(name).grad, expected)
        close(gradient, expected)
