"""What one rank holds whatever the schedule does: weights, gradients, masters, optimizer state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.assemble_step import optimizer_step, precision_of
from pipemega.config import Config
from pipemega.gradients import GradientBuffer
from pipemega.kernels import Kernels
from pipemega.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.build import LocalModel
from pipemega.planning.kernels import DeviceType

# What gradients.square_sum turns to fp64 at one time, by device.
_NORM_BYTES = {"cpu": 8 << 18, "cuda": 8 << 24}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank between two steps, and what the step itself needs beside them.

    Args:
        parameters: trainable and frozen elements here.
        weights: parameters and buffers, as they compute.
        gradients: the flat buffers, padding included.
        masters: fp32 copies of the weights; 0 where the optimizer works on the weights.
        optimizer: the optimizer's state.
        host: of the two, and of what else the optimizer works on, in the memory of the host.
        exact: the optimizer's state was counted; otherwise it is at least this much.
        step: needed while gradients are reduced and the norm is taken.
    """

    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    exact: bool
    step: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.optimizer


@dataclass(frozen=True, eq=False)
class RankOnPaper:
    """One rank's part of a run on the meta device: its model, gradients and footprint."""

    local: LocalModel
    gradients: GradientBuffer
    footprint: Footprint


def rank_on_paper(config: Config, mesh: Mesh, local: LocalModel, device: DeviceType) -> RankOnPaper:
    """Casts the parameters of `local` and builds their optimizer, as a run would.

    Raises:
        ConfigError: the optimizer cannot be built.
    """
    precision = precision_of(config)
    step = optimizer_step(config, mesh, local, precision, Kernels.detect("meta"))
    trainable = [(name, p) for name, p in local.parameters.items() if p.requires_grad]
    gradients = (
        step.gradients
        if step is not None
        else GradientBuffer(trainable, dtype=precision.accumulation_dtype)
    )
    buffers = [b for stage in local.stages.values() for b in stage.buffers()]
    state, exact = _state_bytes(step.optimizer) if step is not None else (0, True)
    weights = [*local.parameters.values(), *buffers]
    masters, host = _apart(step, weights), 0
    if config.zero_optimization.offloads and device == "cuda" and step is not None:
        # Targets and the gradients that are brought to them, whatever dtype computes.
        host = state + 2 * sum(t.nbytes for t in step.targets.named.values())
        state = masters = 0
    footprint = Footprint(
        parameters=sum(p.numel() for p in local.parameters.values()),
        weights=_bytes(weights),
        gradients=_bytes(list(gradients.flats.values())),
        masters=masters,
        optimizer=state,
        exact=exact,
        step=_step_bytes(config, mesh, local, gradients, device),
        host=host,
    )
    return RankOnPaper(local, gradients, footprint)


def _bytes(tensors: list[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _apart(step: OptimizerStep | None, weights: list[Tensor]) -> int:
    """Bytes of what the optimizer works on and is no part of the weights."""
    if step is None:
        return 0
    own = {t.untyped_storage()._cdata for t in weights}
    targets: list[Tensor] = list(step.targets.named.values())
    return _bytes([t for t in targets if t.untyped_storage()._cdata not in own])


def _state_bytes(optimizer: Optimizer) -> tuple[int, bool]:
    """Bytes of the state after a first step, and whether that step could be made.

    One parameter of each shape takes the step, and stands for the others: the optimizer passes by
    those that have no gradient.
    """
    alike: dict[tuple[int, torch.Size, torch.dtype], list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            alike.setdefault((number, p.shape, p.dtype), []).append(p)
    targets = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in targets]
    for p in targets:
        p.grad = None
    for first, *_ in alike.values():
        first.grad = torch.empty_like(first)
    try:
        optimizer.step()
        exact = True
    except (RuntimeError, NotImplementedError):
        # It reads a number, and meta tensors have none; most have made their state by then.
        exact = False
    for p, gradient in zip(targets, before, strict=True):
        p.grad = gradient
    total = 0
    for same in alike.values():
        state = optimizer.state.get(same[0], {})
        total += len(same) * _bytes([v for v in state.values() if isinstance(v, Tensor)])
    return total, exact


def _step_bytes(
    config: Config, mesh: Mesh, local: LocalModel, gradients: GradientBuffer, device: DeviceType
) -> int:
    """The most that the end of a step needs at one time, beside what is always there."""
    flats = list(gradients.flats.values())
    tied = 0
    for name, axis in local.tied.items():
        if local.parameters[name].requires_grad:
            copies = axis.size - 1 if axis.rank == 0 else 1
            tied = max(tied, copies * gradients.view(local.parameters[name]).numel() * 4)
    sent = _sent_bytes(config, mesh, gradients, device)
    norm = min(_NORM_BYTES[device], max((8 * f.numel() for f in flats), default=0))
    return max(tied, sent, norm)


def _sent_bytes(config: Config, mesh: Mesh, gradients: GradientBuffer, device: DeviceType) -> int:
    """Beside the gradients while they are summed over the data ranks."""
    if mesh.data.size == 1:
        return 0
    buckets = gradients.layout.buckets
    pieces = (
        [(b.dtype, b.place.size) for b in buckets] if buckets else [*gradients.layout.sizes.items()]
    )
    name = config.communication_data_type
    sizes = []
    for dtype, size in pieces:
        sent = dtype if name is None else _DTYPES[name]
        # Cast before they are sent; and gloo lets them land beside what is sent.
        copies = (sent != dtype) + (bool(buckets) and device == "cpu")
        sizes.append(copies * size * sent.itemsize)
    several = 2 if config.zero_optimization.overlap_comm else 1
    return sum(sorted(sizes)[-several:]) if buckets else max(sizes, default=0)
