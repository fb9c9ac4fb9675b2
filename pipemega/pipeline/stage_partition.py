"""Partitions the layers of the model into stages, by `pipeline.partition`."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Mesh, from_first
from pipemega.errors import ConfigError
from pipemega.pipeline.backward_pass import run_backward
from pipemega.pipeline.microbatch_loss import weighted_loss
from pipemega.pipeline.module import BuildOptions, PipelineModule, Stage, build_stages
from pipemega.pipeline.plan import partition
from pipemega.pipeline.stage_input import collect_gradients
from pipemega.tensor_parallel.deferred_logits import defer_logits

Method = str | Sequence[int]
Sample = Callable[[], tuple[Any, Any]]
"""Returns the (inputs, labels) of one micro-batch."""


def stage_bounds(
    net: PipelineModule,
    method: Method,
    num_stages: int,
    mesh: Mesh,
    options: BuildOptions,
    sample: Sample,
) -> tuple[int, ...]:
    """Return the bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.

    Collective for "profile".

    Args:
        method: "parameters" (or "best"), "uniform", "type:REGEX", "profile" or the bounds; all but
            the last start stages at the `SPLIT`s of the model.
        sample: returns a micro-batch, for "profile"; raises ConfigError if it has none.

    Raises:
        ConfigError: names pipeline.partition: more stages than layers, no layer matches, ...
    """
    if not isinstance(method, str):
        return tuple(partition.explicit(method, len(net), num_stages))
    splits = () if net.origin is None else net.origin.splits
    if method in ("parameters", "best"):
        return tuple(partition.partition_at(net.count_parameters(), splits, num_stages))
    if method == "uniform":
        if splits:
            return tuple(partition.partition_at([1] * len(net), splits, num_stages))
        return tuple(partition.uniform(len(net), num_stages))
    if method.startswith("type:"):
        regex = method.removeprefix("type:")
        return tuple(partition.by_type(regex, net.layer_names, num_stages, splits))
    if method == "profile":
        seconds = layer_seconds(net, mesh, options, sample)
        return tuple(partition.partition_at(seconds, splits, num_stages))
    raise ConfigError(
        f"pipeline.partition is {method!r}; it may be 'auto', 'parameters', 'uniform', "
        f"'type:REGEX', 'profile' or a list of bounds"
    )


def layer_seconds(
    net: PipelineModule, mesh: Mesh, options: BuildOptions, sample: Sample, rounds: int = 3
) -> list[float]:
    """Return the median seconds of forward and backward of each layer; equal on all ranks.

    One layer at a time is built, measured and freed. All ranks measure, because parallel layers
    communicate; the result is that of rank 0.
    """
    x, labels = sample()
    seconds = []
    loss_fn = net.build_loss(mesh.tensor)
    for position in range(len(net)):
        (stage,) = build_stages(net, [position, position + 1], [0], options).values()
        final_loss = loss_fn if position == len(net) - 1 else None
        runs = [_seconds(stage, x, labels, final_loss) for _ in range(rounds + 1)]
        seconds.append(statistics.median(run for run, _ in runs[1:]))
        x = pytree.tree_map_only(Tensor, Tensor.detach, runs[-1][1])
    return from_first(mesh.world, lambda: seconds)


def _seconds(layer: Stage, x: Any, labels: Any, loss_fn: Any) -> tuple[float, Any]:
    x = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
    x, _ = collect_gradients(x)
    started = time.perf_counter()
    with defer_logits(loss_fn, layer.last_layer):
        output = layer(x)
    result = output
    if loss_fn is not None:
        result = weighted_loss(loss_fn(output, labels)).sum
    roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    run_backward(roots, [torch.ones_like(t) for t in roots])
    if roots and roots[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, output
