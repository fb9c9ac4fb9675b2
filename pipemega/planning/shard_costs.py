"""Costs of the passes of vocabulary parallelism on one rank, counted on the meta device.

They run as in `pipeline.vocabulary_runs`; all labels count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemega.optimizer.mixed_precision import Precision
from pipemega.pipeline.messages import tensors_of
from pipemega.pipeline.plan.costs import VocabularyCosts
from pipemega.pipeline.plan.kinds import VOCABULARY_PASSES, Direction, Kind
from pipemega.pipeline.vocabulary_shard import VocabularyShard
from pipemega.planning.model_source import Sample
from pipemega.profiling.kernel_rates import KernelRates
from pipemega.profiling.meta_kernels import DeviceKernels, DeviceType
from pipemega.profiling.tensor_meter import TensorMeter
from pipemega.tensor_parallel.shard_softmax import (
    combine,
    hidden_gradient,
    logit_gradient,
    output_pass,
)


@dataclass(frozen=True)
class ShardCosts:
    """Costs of the passes for one micro-batch.

    Args:
        rows: bytes of the rows of the token ids, and of their gradient.
        hidden, partial, normalizers: bytes of the tensors of these transfers.
        kept: bytes from S to T, without `hidden`.
        working: kind -> temporary bytes of the pass, its results included.
        seconds: of the passes, by the fixed table of `kernel_rates`.
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
            unit: of the times, in seconds of the table.
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
