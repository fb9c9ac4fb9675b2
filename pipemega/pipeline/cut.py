"""Where the model is cut into stages, as `pipeline.partition` asks for it."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.errors import ConfigError
from pipemega.mesh import Mesh, from_first
from pipemega.pipeline import partition
from pipemega.pipeline.module import Building, PipelineModule, build_stages

Method = str | Sequence[int]
Sample = Callable[[], tuple[Any, Any]]
"""Returns the (inputs, labels) of one micro-batch."""


def stage_bounds(
    net: PipelineModule,
    method: Method,
    num_stages: int,
    mesh: Mesh,
    building: Building,
    sample: Sample,
) -> tuple[int, ...]:
    """Stage s is layers bounds[s] to bounds[s + 1] - 1.  Collective for "profile".

    Args:
        method: "parameters" (or "best"), "uniform", "type:REGEX", "profile" or the bounds.
        sample: a micro-batch, for "profile"; raises ConfigError where there is none.

    Raises:
        ConfigError: names pipeline.partition; more stages than layers, nothing matches, ...
    """
    if not isinstance(method, str):
        return tuple(partition.explicit(method, len(net), num_stages))
    if method in ("parameters", "best"):
        return tuple(partition.partition(net.count_parameters(), num_stages))
    if method == "uniform":
        return tuple(partition.uniform(len(net), num_stages))
    if method.startswith("type:"):
        return tuple(partition.by_type(method.removeprefix("type:"), net.layer_names, num_stages))
    if method == "profile":
        return tuple(partition.partition(layer_seconds(net, mesh, building, sample), num_stages))
    raise ConfigError(
        f"pipeline.partition is {method!r}; it may be 'parameters', 'uniform', 'type:REGEX', "
        f"'profile' or a list of bounds"
    )


def layer_seconds(
    net: PipelineModule, mesh: Mesh, building: Building, sample: Sample, rounds: int = 3
) -> list[float]:
    """Forward and backward of each layer on one micro-batch: medians, the same on every rank.

    Each layer is built, measured and let go before the next. Every rank measures, since parallel
    layers need their peers; rank 0's figures are taken.
    """
    x, labels = sample()
    seconds = []
    loss_fn = net.build_loss(mesh.tensor)
    for position in range(len(net)):
        (stage,) = build_stages(net, [position, position + 1], [0], building).values()
        closing = loss_fn if position == len(net) - 1 else None
        runs = [_seconds(stage, x, labels, closing) for _ in range(rounds + 1)]
        seconds.append(statistics.median(run for run, _ in runs[1:]))
        x = pytree.tree_map_only(Tensor, Tensor.detach, runs[-1][1])
    return from_first(mesh.world, lambda: seconds)


def _seconds(layer: Any, x: Any, labels: Any, loss_fn: Any) -> tuple[float, Any]:
    inputs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x
    )
    started = time.perf_counter()
    output = layer(inputs)
    result = output
    if loss_fn is not None:
        loss = loss_fn(output, labels)
        result = loss[0] if isinstance(loss, tuple) else loss
    wanted = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
    if wanted and wanted[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, output
