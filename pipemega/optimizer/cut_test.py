"""Tests whether an optimizer computes the same with parameters that are cut over ranks.

    whole      | a a a a a a |  | b b b |          one optimizer over all parameters
    pipeline   | a a a a a a |  and | b b b |      one optimizer for the parameters of each rank
    tensor     | a a a |   and | a a a |           one for the first halves, one for the others
    ZeRO       | a a |     and | a a a a |         as tensor, but 1-D slices, of other sizes

The parameters are small, in groups like those of the model; all optimizers get the same gradients
for a few steps.  If they give other values, the optimizer computes with norms, whole matrices or
several parameters, and would train another model on the mesh.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis, Mesh, gather_objects, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.optimizer.param_groups import options_of
from pipemega.optimizer.user_optimizer import OptimizerMaker, call
from pipemega.parameters import shard_of
from pipemega.random import preserve_rng

# Some optimizers compute with norms or matrices only after a number of steps.
_STEPS = 30
_SIZES = (6, 4, 3, 2, 2)
# Rounding of fp32 state is below, a weight decay of 1e-4 is above.
_TOLERANCE = 1e-5
_LR = 1e-2  # in place of 0, with which no parameter would change

Split = Callable[[Tensor], list[Tensor]]
"""Tensor -> its parts; the optimizers of all parts together update the tensor."""


class _Layout(NamedTuple):
    """How a mesh cuts parameters.

    Args:
        what: for messages, with the key and its value.
        needs: what the optimizer must do.
        advice: how to avoid the cut.
        split: tensor -> parts; one optimizer for the first parts, one for the second..
        alone: each tensor has an optimizer of its own.
    """

    what: str
    needs: str
    advice: str
    split: Split
    alone: bool = False


def check_cuts(
    make: OptimizerMaker,
    groups: Sequence[Mapping[str, Any]],
    mesh: Mesh,
    shard_axis: Axis | None,
) -> None:
    """Refuse an optimizer that gives other values on this mesh than in one process.  Collective.

    Args:
        make: builds the optimizer from groups; called several times.
        groups: of the masters of this rank; their options are used.
        mesh: that cuts the parameters.
        shard_axis: the data ranks that hold slices of each parameter (ZeRO); None: they are whole.

    Raises:
        ConfigError: with the layout, the difference and the alternatives; on every rank.
    """
    layouts = list(_layouts(mesh, shard_axis))
    if not layouts:
        return
    local = [{len(shard_of(p).shape) for p in group["params"]} for group in groups]
    # Of the whole model, so that all ranks do the same test.
    gathered = gather_objects(local, mesh.world)
    dims = [sorted(set().union(*of_group)) for of_group in zip(*gathered, strict=True)]
    masters = [p for group in groups for p in group["params"]]
    device = masters[0].device if masters else mesh.device
    options = [options_of(group) for group in groups]

    def check() -> None:
        for layout in layouts:
            with preserve_rng(device):
                problem = _problem(make, options, dims, layout, device)
            if problem is not None:
                raise ConfigError(
                    f"{problem}. On this mesh {layout.what}, so the optimizer must update "
                    f"{layout.needs}. {layout.advice}, or use an optimizer such as AdamW or SGD; "
                    "if the test is wrong, set zero_allow_untested_optimizer to true"
                )

    # The function of a user may differ between ranks.
    on_all_ranks(mesh.world, check)


def _layouts(mesh: Mesh, shard_axis: Axis | None) -> Iterator[_Layout]:
    if mesh.pipeline.size > 1:
        yield _Layout(
            f"mesh.pipeline ({mesh.pipeline.size}) gives each rank the parameters of its stages",
            "each parameter without the others",
            "Set mesh.pipeline to 1",
            lambda tensor: [tensor],
            alone=True,
        )
    each = "each element separately, with a state of the shape of the parameter"
    if mesh.tensor.size > 1:
        for dim in (0, 1):
            yield _Layout(
                f"mesh.tensor ({mesh.tensor.size}) shards parameters",
                each,
                "Set mesh.tensor to 1",
                lambda tensor, dim=dim: _halves(tensor, dim),  # type: ignore[misc]
            )
    if shard_axis is not None:
        yield _Layout(
            f"zero_optimization.stage 1 gives each of {shard_axis.size} data ranks a 1-D slice of "
            "each parameter",
            each,
            "Set zero_optimization.stage to 0",
            _slices,
        )


def _halves(tensor: Tensor, dim: int) -> list[Tensor]:
    # A parameter without this dim is not sharded.
    return [tensor] if tensor.dim() <= dim else list(tensor.chunk(2, dim))


def _slices(tensor: Tensor) -> list[Tensor]:
    flat, cut = tensor.reshape(-1), tensor.numel() // 3
    return [flat[:cut], flat[cut:], flat[:0]]


def _problem(
    make: OptimizerMaker,
    options: Sequence[Mapping[str, Any]],
    dims: Sequence[Sequence[int]],
    layout: _Layout,
    device: torch.device,
) -> str | None:
    """Return how the optimizer differs under `layout`; None if it does not.

    Raises:
        ConfigError: it fails with whole parameters.
    """
    for dtype in (torch.float64, torch.float32):
        tensors = _tensors(dims, dtype, device)
        try:
            whole = _train(make, options, [tensors])
        except ConfigError as error:
            # Some kernels have no fp64.
            if dtype == torch.float64:
                continue
            raise ConfigError(
                f"the optimizer fails with small parameters of as many dims as those of the model "
                f"have: {error}. If it works with the model, set zero_allow_untested_optimizer to "
                "true"
            ) from error
        try:
            cut = _train(make, options, _parts(tensors, layout))
        except ConfigError as error:
            return f"the optimizer cannot update parts of parameters: {error}"
        return _difference(tensors, whole, _joined(tensors, layout, cut))
    return None


class _Tensor(NamedTuple):
    """A parameter and its gradients.

    Args:
        group: index of its group.
        value: the first value.
        gradients: of each step.
    """

    group: int
    value: Tensor
    gradients: list[Tensor]


def _tensors(
    dims: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[_Tensor]:
    """Return two tensors for each number of dims of each group, with gradients of other sizes."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    found = []
    for group, counts in enumerate(dims):
        for count in counts:
            for size, noise in ((1.0, 0.5), (30.0, 3.0)):
                shape = _SIZES[:count]
                # Rows of other sizes, so that norms of parts differ from that of the whole.
                scale = size * torch.linspace(0.2, 3.0, shape[0] if shape else 1)
                scale = scale.view(-1, *[1] * (count - 1)).to(device, dtype)
                scale = scale if shape else scale[0]
                # With little noise, estimates of the distance to the optimum grow.
                mean = normal(shape)
                gradients = [(mean + noise * normal(shape)) * scale for _ in range(_STEPS)]
                found.append(_Tensor(group, normal(shape), gradients))
    return found


def _parts(tensors: Sequence[_Tensor], layout: _Layout) -> list[list[_Tensor]]:
    """Return the tensors of each optimizer under `layout`."""
    if layout.alone:
        return [[tensor] for tensor in tensors]
    split = [
        [
            _Tensor(tensor.group, value, list(gradients))
            for value, *gradients in zip(
                layout.split(tensor.value), *map(layout.split, tensor.gradients), strict=True
            )
        ]
        for tensor in tensors
    ]
    count = max(map(len, split), default=0)
    return [[parts[i] for parts in split if i < len(parts)] for i in range(count)]


def _train(
    make: OptimizerMaker,
    options: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Sequence[_Tensor]],
) -> list[list[Tensor]]:
    """Return the values of the tensors of each optimizer after some steps.

    Raises:
        ConfigError: the optimizer cannot be built, or its step fails.
    """
    return [_train_one(make, options, tensors) for tensors in optimizers]


def _train_one(
    make: OptimizerMaker, options: Sequence[Mapping[str, Any]], tensors: Sequence[_Tensor]
) -> list[Tensor]:
    parameters = [nn.Parameter(tensor.value.clone()) for tensor in tensors]
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in options]
    for tensor, parameter in zip(tensors, parameters, strict=True):
        groups[tensor.group]["params"].append(parameter)
    named = {f"test parameter {i}": parameter for i, parameter in enumerate(parameters)}
    optimizer = call(make, groups, named)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] or _LR
    for step in range(_STEPS):
        for tensor, parameter in zip(tensors, parameters, strict=True):
            parameter.grad = tensor.gradients[step].clone()
        try:
            optimizer.step()
        except Exception as error:
            name = type(optimizer).__name__
            raise ConfigError(f"{name}.step() raised {type(error).__name__}: {error}") from error
    return [parameter.detach() for parameter in parameters]


def _joined(
    tensors: Sequence[_Tensor], layout: _Layout, trained: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the tensors that the parts of `trained` are parts of."""
    if layout.alone:
        return [part for (part,) in trained]
    queues = [iter(parts) for parts in trained]
    joined = []
    for tensor in tensors:
        whole = torch.empty_like(tensor.value)
        for part, queue in zip(layout.split(whole), queues, strict=False):
            part.copy_(next(queue))
        joined.append(whole)
    return joined


def _difference(
    tensors: Sequence[_Tensor], whole: Sequence[Sequence[Tensor]], cut: Sequence[Tensor]
) -> str | None:
    """Return the largest difference, relative to the update of its tensor; None if it is small."""
    worst = 0.0
    for tensor, one, other in zip(tensors, whole[0], cut, strict=True):
        update = float((one - tensor.value).abs().max())
        change = float((one - other).abs().max())
        if change != 0:
            share = change / update if update else math.inf
            worst = max(worst, math.inf if math.isnan(share) else share)
    if worst <= _TOLERANCE:
        return None
    return (
        "the optimizer does not work on parts of the parameters: in a test its updates of cut "
        f"parameters differ from those of whole ones by {worst:.2g} of the update"
    )
