"""Collectives on several process groups are started in one order on all ranks that share a group.

NCCL requires it of communicators whose kernels may not fit on the GPU at the same time: if one rank
starts a collective of its tensor group before one of its data group, and another rank the other
way round, each may wait for the other.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks.pool import RankPool
from tests.ranks.training_runs import build, data, settings
from tests.sampling import some_cases

MESSAGES = ("send", "recv_", "recv_any_source_")


class Collectives(TorchDispatchMode):
    """Records (axis, operation, number of elements) of each collective that is started."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._overloadpacket._qualified_op_name.partition("::")
        if namespace == "c10d" and name not in MESSAGES:
            leaves = pytree.tree_leaves(args)
            (group,) = (
                dist.ProcessGroup.unbox(leaf)
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            )
            numel = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.calls.append((self._axes[group.group_name], name, numel))
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(config: dict[str, Any]) -> list[tuple[str, str, int]]:
    engine = build(config)
    mesh = engine.mesh
    axes = {
        axis.group.group_name: axis.name
        for axis in (mesh.pipeline, mesh.data, mesh.tensor, mesh.world)
        if axis.group is not None
    }
    with Collectives(axes) as collectives:
        engine.train_batch(data(engine, 0))
    return collectives.calls


def _with_sizes(calls: list[tuple[str, str, int]], same_data: bool) -> list[tuple[str, str, int]]:
    """Return calls without the sizes that may differ between data ranks.

    The head exchanges only tokens whose labels count.
    """
    return [(axis, op, size if same_data or axis != "tensor" else 0) for axis, op, size in calls]


ZERO = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500}


@pytest.mark.parametrize(
    ("mesh", "schedule", "axes"),
    some_cases(
        [
            (
                {"tensor": 2, "data": 2, "sequence_parallel": True},
                "1f1b",
                {"tensor", "data", "world"},
            ),
            ({"pipeline": 2, "data": 2}, "zb-h1", {"data", "world"}),
            ({"pipeline": 2, "tensor": 2}, "interleaved", {"tensor", "world"}),
        ],
        0,
        2,
    ),
    ids=["tensor and data", "pipeline and data", "pipeline and tensor"],
)
def test_ranks_with_the_same_stages_start_collectives_in_the_same_order(
    pool: RankPool, mesh: dict[str, Any], schedule: str, axes: set[str]
) -> None:
    config = settings(
        mesh=mesh, zero_optimization=ZERO, pipeline={"schedule": schedule}, model={"num_layers": 4}
    )
    calls = pool.run(4, collectives_of_a_step, config)
    per_stage, tensor = 4 // mesh.get("pipeline", 1), mesh.get("tensor", 1)
    for first in range(0, 4, per_stage):
        assert {axis for axis, _, _ in calls[first]} >= axes
        for rank in range(first + 1, first + per_stage):
            same_data = rank // tensor == first // tensor
            assert _with_sizes(calls[rank], same_data) == _with_sizes(calls[first], same_data), rank
    if {"tensor", "data"} <= axes:
        # Reductions of gradients start between the collectives of layers.
        first = next(i for i, (axis, _, _) in enumerate(calls[0]) if axis == "data")
        assert any(axis == "tensor" and name != "allreduce_" for axis, name, _ in calls[0][first:])
