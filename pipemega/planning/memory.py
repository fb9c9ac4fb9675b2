"""Counts the memory of a rank for weights, gradients, masters and optimizer state.

Costs of the passes of vocabulary parallelism on one rank, counted on the meta device.

They run as in `pipeline.vocabulary_runs`; all labels count.

What the passes of vocabulary parallelism change in the memory of a rank.

    instruction       allocates                                   until
    E                 rows of the token ids                       F of the first stage
    RE                the rows of the other shards                F of the first stage
    F (last stage)    hidden; RH: a buffer for it                 T
    S                 exponentials; the partial result            T; C
    RP                the partial results of the other shards     C
    C                 gradient of hidden; normalizers             B or I; T
    B, I (first)      gradient of the rows; REG: a buffer for it  G

On the CPU, gloo keeps sent rows and partial results until the answer of the stage arrives, and
what the stage sends to the shards until the end of the step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.config import Config
from pipemega.config.sections.scheduler_section import RunLength
from pipemega.distributed.mesh import Mesh
from pipemega.layer_costs.stage_costs import Sample
from pipemega.layer_costs.tensor_meter import DeviceKernels, DeviceType, KernelRates, TensorMeter
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import (
    OptimizerArguments,
    model_params,
    optimizer_step,
    precision_of,
)
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.mixed_precision import Precision
from pipemega.parameters import replicas_of
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.plan.instructions import VOCABULARY_PASSES, Direction, Instruction, Kind
from pipemega.pipeline.plan.simulate import VocabularyCosts
from pipemega.tensor_parallel.cross_entropy import (
    combine,
    hidden_gradient,
    logit_gradient,
    output_pass,
)

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
    def parts(self) -> dict[str, int]:
        """Bytes of the device's memory by name: what tables, bars and the total are made of."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.masters + self.optimizer,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())


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

    What several data ranks hold is divided among them.
    """

    def divided(tensors: Iterable[Tensor]) -> int:
        return sum(t.nbytes // replicas_of(t, mesh).size for t in tensors)

    masters = {} if step is None else step.masters.named
    saved = frozenset[str]() if step is None else step.masters.saved_masters
    slices = [masters[name] for name in saved]
    whole = divided(p for name, p in local.parameters.items() if name not in saved)
    if step is not None and step.masters.spans is not None:
        return state + sum(m.nbytes for m in slices) + whole
    # The state of a parameter is as large as all others of its size.
    trained = list(masters.values())
    state = state * divided(trained) // max(1, sum(m.nbytes for m in trained))
    return state + divided(slices) + whole


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
    concurrent = 1 if config.zero_optimization.overlap(device) == "nothing" else 2
    return sum(sorted(sizes)[-concurrent:]) if buckets else max(sizes, default=0)


@dataclass(frozen=True)
class ShardCosts:
    """Costs of the passes for one micro-batch.

    Args:
        rows: bytes of the rows of the token ids, and of their gradient.
        hidden, partial, normalizers: bytes of the tensors of these transfers.
        kept: bytes from S to T, without `hidden`.
        working: kind -> temporary bytes of the pass, its results included.
        seconds: kind -> seconds of the pass, by the fixed table of `kernel_rates`.
    """

    rows: int
    hidden: int
    partial: int
    normalizers: int
    kept: int
    working: dict[Kind, int]
    seconds: dict[Kind, float]

    @property
    def message_bytes(self) -> dict[Direction, int]:
        """Name of a transfer -> bytes of a message."""
        return {
            "embedding": self.rows,
            "embedding gradient": self.rows,
            "hidden": self.hidden,
            "partial": self.partial,
            "normalizer": self.normalizers,
        }

    def times(self, unit: float) -> VocabularyCosts:
        """Return the times and the memory for a simulation.

        Args:
            unit: the unit of the times, in seconds of the table.
        """
        embed, embed_weight, output, loss, weight = (
            self.seconds[kind] / unit for kind in VOCABULARY_PASSES
        )
        kept = float(self.kept + self.hidden)
        return VocabularyCosts(embed, embed_weight, output, loss, weight, kept)


class _Metered(NamedTuple):
    """The result of a pass, the bytes that stay, the most bytes in use, and the seconds."""

    result: Any
    kept: int
    working: int
    seconds: float

    @classmethod
    def of(cls, meter: TensorMeter, work: Callable[[], Any]) -> "_Metered":
        before, seconds = meter.now, meter.seconds
        meter.reset_peak()
        result = work()
        return cls(result, meter.now - before, meter.peak - before, meter.seconds - seconds)


def count_shards(
    shards: Sequence[VocabularyShard],
    sample: Sample,
    precision: Precision,
    rates: KernelRates,
    device: DeviceType,
) -> tuple[ShardCosts, ...]:
    """Return the costs of the passes on the rank of each shard; all are on the meta device.

    The last shards have fewer rows than the others if the vocabulary does not divide.
    """
    different = {shard.num_rows: shard for shard in shards}
    costs = {
        rows: _count_shard(shard, sample, precision, rates, device)
        for rows, shard in different.items()
    }
    return tuple(costs[shard.num_rows] for shard in shards)


def _count_shard(
    shard: VocabularyShard,
    sample: Sample,
    precision: Precision,
    rates: KernelRates,
    device: DeviceType,
) -> ShardCosts:
    for named in shard.logical_names():
        precision.cast_parameters([named])
    weight, objective, head = shard.head.weight, shard.split.token_loss, shard.head_rows()
    ids, target = shard.split.token_ids(sample.inputs), sample.labels.reshape(-1)
    x = weight.new_empty(len(target), shard.split.hidden_size)
    existing = [*shard.parameters(), *tensors_of((sample.inputs, sample.labels)), x, ids, target]
    grad = torch.empty_like(weight, dtype=precision.accumulation_dtype or weight.dtype)
    with torch.no_grad(), DeviceKernels(device), TensorMeter([*existing, grad], rates) as meter:
        metered = partial(_Metered.of, meter)
        embed = metered(lambda: shard.embed(ids))
        output = metered(lambda: output_pass(head, x, target, objective, gradient=True))
        part, kept = output.result
        parts = [part] * shard.pipeline.size

        def combined() -> Any:
            result = combine(parts, target, objective, shard.tensor)
            gradient = hidden_gradient(parts, result, result.losses, objective)
            return gradient.to(weight.dtype), torch.stack([result.normalizer, result.losses])

        loss = metered(combined)
        normalizers = loss.result[1]

        def output_gradient() -> None:
            dlogits = logit_gradient(head, target, kept, normalizers, objective)
            _add_weight_gradient(dlogits, x, weight, grad)

        output_weight = metered(output_gradient)
        embed_weight = metered(lambda: shard.embed_gradient(ids, embed.result))
    passes = dict(
        zip(VOCABULARY_PASSES, (embed, embed_weight, output, loss, output_weight), strict=True)
    )
    sent = sum(t.nbytes for t in part.tensors())
    return ShardCosts(
        rows=embed.result.nbytes,
        hidden=x.nbytes,
        partial=sent,
        normalizers=normalizers.nbytes,
        kept=output.kept - sent,
        working={kind: each.working for kind, each in passes.items()},
        seconds={kind: each.seconds for kind, each in passes.items()},
    )


def _add_weight_gradient(dlogits: Tensor, x: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Add the gradient of the head to `grad`, as the gradient buffers do."""
    if grad.dtype == weight.dtype:
        grad[: dlogits.shape[1]].addmm_(dlogits.t(), x)
        return
    # The gradient of all rows, then its sum in the accumulation dtype.
    padded = torch.zeros_like(weight)
    padded[: dlogits.shape[1]] = dlogits.t() @ x
    grad.add_(padded)


class ShardChange(NamedTuple):
    """Bytes that an instruction adds, its temporary bytes with them, and what it frees first."""

    activations: int = 0
    messages: int = 0
    working: int = 0
    freed: int = 0


class ShardMemory:
    """The changes on one rank.

    Args:
        rank_of_stage: the pipeline rank of each stage of the plan.
        num_ranks: number of pipeline ranks.
    """

    def __init__(
        self,
        costs: ShardCosts,
        rank_of_stage: Sequence[int],
        rank: int,
        num_ranks: int,
        device: DeviceType,
    ) -> None:
        self._costs, self._others = costs, num_ranks - 1
        self._last_stage = len(rank_of_stage) - 1
        self._is_first, self._is_last = rank_of_stage[0] == rank, rank_of_stage[-1] == rank
        self._gloo = device == "cpu"

    def of_pass(self, step: Instruction) -> ShardChange:
        """Return the change by a pass or a message of vocabulary parallelism."""
        c, others, first, last = self._costs, self._others, self._is_first, self._is_last
        sent = 0 if self._gloo else -1
        messages = {
            Kind.EMBED: c.rows,
            Kind.SEND_EMBEDDING: sent * c.rows,
            Kind.RECV_EMBEDDING: others * c.rows,
            Kind.RECV_HIDDEN: c.hidden,
            Kind.OUTPUT: c.partial,
            Kind.SEND_PARTIAL: sent * c.partial,
            Kind.RECV_PARTIAL: others * c.partial,
            Kind.LOSS: c.hidden + c.normalizers - (others + 1) * c.partial,
            Kind.RECV_NORMALIZER: c.normalizers,
            Kind.RECV_EMBEDDING_GRADIENT: c.rows,
        }.get(step.kind, 0)
        activations = freed = 0
        if step.kind is Kind.OUTPUT:
            activations = c.kept
        elif step.kind is Kind.OUTPUT_WEIGHT:
            activations = -c.kept - (c.hidden if last else 0)
            freed = c.partial if self._gloo and not last else 0
            messages -= freed + (0 if last else c.hidden)
            messages -= 0 if last and self._gloo else c.normalizers
        elif step.kind is Kind.EMBED_WEIGHT:
            freed = c.rows if self._gloo and not first else 0
            messages -= freed + (0 if first and self._gloo else c.rows)
        # The partial result is several tensors, which are copied into one message.
        packed = c.partial if step.kind is Kind.SEND_PARTIAL else 0
        return ShardChange(activations, messages, c.working.get(step.kind, packed), freed)

    def of_stage(self, step: Instruction) -> ShardChange:
        """Return the change by F, B or I in addition to the change by its stage."""
        c, activations, messages, working = self._costs, 0, 0, 0
        if step.kind is Kind.FORWARD:
            if step.stage == 0:
                # The sum of all rows is a tensor of its own, which counts for the stage.
                messages, working = -(self._others + 1) * c.rows, c.rows
            if step.stage == self._last_stage:
                activations = c.hidden
        elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            messages += c.rows * (step.stage == 0) - c.hidden * (step.stage == self._last_stage)
        return ShardChange(activations, messages, working)
