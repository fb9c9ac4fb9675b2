"""Counts the memory of a rank for weights, gradients, masters and optimizer state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.config import Config
from pipemega.config.scheduler import RunLength
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import (
    OptimizerArguments,
    model_params,
    optimizer_step,
    precision_of,
)
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.local_model import LocalModel
from pipemega.profiling.meta_kernels import DeviceType

# Bytes that grad_norm.square_sums converts to fp64 at one time, by device.
_NORM_BYTES = {"cpu": 8 << 18, "cuda": 0}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank between two steps, and temporary bytes of the optimizer step.

    Args:
        parameters: number of trainable and frozen elements on this rank.
        weights: parameters and buffers, in the dtype of the computation.
        gradients: the flat buffers with their padding.
        masters: fp32 copies of the weights; 0 if the optimizer updates the weights directly.
        optimizer: state of the optimizer.
        exact: the optimizer state was counted; otherwise `optimizer` is a lower bound.
        step: temporary memory of the gradient reduction and the gradient norm.
        host: host memory of an offloaded optimizer: its state, and the buffers of masters,
            gradients and parameters.
        staging: host memory of the copy that is saved in the background (`checkpoint.async`).
    """

    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    exact: bool
    step: int
    host: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.optimizer


def count_footprint(config: Config, mesh: Mesh, local: LocalModel, device: DeviceType) -> Footprint:
    """Cast the parameters of `local`, build the optimizer as in a run, and count both.

    Raises:
        ConfigError: the optimizer cannot be built.
    """
    # The meta device stands for `device`; offload from a CPU moves nothing.
    # The learning rate needs no memory: any length of the run will do.
    constant_rate = config.model_copy(update={"scheduler": None})
    arguments, offload = OptimizerArguments(), device == "cuda"
    step = optimizer_step(constant_rate, mesh, local, arguments, RunLength(), offload=offload)
    if step is None:
        dtype = precision_of(config).accumulation_dtype
        gradients = GradientBuffer(model_params(local).with_gradient, dtype=dtype)
    else:
        gradients = step.gradients
    buffers = [b for stage in local.stages.values() for b in stage.buffers()]
    state, exact = _state_bytes(step.optimizer) if step is not None else (0, True)
    weights = [*local.parameters.values(), *buffers]
    masters, host = _master_bytes(step, weights), 0
    staging = _staging_bytes(mesh, local, step, state) if config.checkpoint.in_background else 0
    if step is not None and step.masters.offload is not None:
        host = state + step.masters.offload.nbytes
        state = masters = 0
    return Footprint(
        parameters=sum(p.numel() for p in local.parameters.values()),
        weights=_bytes(weights),
        gradients=_bytes(list(gradients.flats.values())),
        masters=masters,
        optimizer=state,
        exact=exact,
        step=_step_bytes(config, mesh, local, gradients, device),
        host=host,
        staging=staging,
    )


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the storages, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _master_bytes(step: OptimizerStep | None, weights: list[Tensor]) -> int:
    """Return the bytes of the optimizer's tensors that do not share memory with the weights."""
    if step is None:
        return 0
    of_weights = {t.untyped_storage()._cdata for t in weights}
    updated: list[Tensor] = list(step.masters.named.values())
    return _bytes([t for t in updated if t.untyped_storage()._cdata not in of_weights])


def _staging_bytes(mesh: Mesh, local: LocalModel, step: OptimizerStep | None, state: int) -> int:
    """Return the bytes that this rank saves, up to the parts of tied and replicated parameters.

    What all data ranks hold is divided among them.
    """
    masters = {} if step is None else step.masters.named
    saved = frozenset[str]() if step is None else step.masters.saved_masters
    slices = sum(masters[name].nbytes for name in saved)
    whole = sum(p.nbytes for name, p in local.parameters.items() if name not in saved)
    if step is None or step.masters.spans is None:
        return (state + slices + whole) // mesh.data.size
    return state + slices + whole // mesh.data.size


def _state_bytes(optimizer: Optimizer) -> tuple[int, bool]:
    """Return the bytes of the state after a first step, and whether that step succeeded.

    Only one parameter of each shape gets a gradient and takes the step; the optimizer skips the
    others, and their state has the same size.
    """
    by_shape: dict[tuple[int, torch.Size, torch.dtype], list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            by_shape.setdefault((number, p.shape, p.dtype), []).append(p)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    for first, *_ in by_shape.values():
        first.grad = torch.empty_like(first)
    try:
        optimizer.step()
        exact = True
    except (RuntimeError, NotImplementedError):
        # The step reads a tensor value; most optimizers have created their state by then.
        exact = False
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = gradient
    total = 0
    for equal in by_shape.values():
        state = optimizer.state.get(equal[0], {})
        total += len(equal) * _bytes([v for v in state.values() if isinstance(v, Tensor)])
    return total, exact


def _step_bytes(
    config: Config, mesh: Mesh, local: LocalModel, gradients: GradientBuffer, device: DeviceType
) -> int:
    """Return the maximum temporary bytes of the optimizer step."""
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
    """Return the temporary bytes of the gradient reduction over the data ranks."""
    if mesh.data.size == 1:
        return 0
    layout, buckets = gradients.layout, gradients.layout.buckets
    parts = [(b.dtype, b.place.size) for b in buckets] if buckets else [*layout.sizes.items()]
    name = config.communication_data_type
    sizes = []
    for dtype, size in parts:
        sent = dtype if name is None else _DTYPES[name]
        # A copy in the communication dtype; gloo also needs a separate receive buffer.
        copies = (sent != dtype) + (bool(buckets) and device == "cpu")
        sizes.append(copies * size * sent.itemsize)
    concurrent = 2 if config.zero_optimization.overlap_comm else 1
    return sum(sorted(sizes)[-concurrent:]) if buckets else max(sizes, default=0)
