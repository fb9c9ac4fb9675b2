"""Warns about layers with running statistics, which micro-batches and data ranks update apart.

Updates the statistics of DeferredBatchNorms and of the routers of experts, once for each step that
is not skipped.

Loads of the experts, and auxiliary losses, for the records. Their sums need no collective and no
host read of their own: they are part of the one all-reduce of the optimizer step.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipemega.config import Batch, Config
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError
from pipemega.moe.router import RouterStatistics
from pipemega.optimizer import StepReport
from pipemega.pipeline.model.batch_norm import DeferredBatchNorm, deferred_statistics
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import LocalModel
from pipemega.printing import listed

# Of a router, in the order of `RouterStatistics.loss_sums`.
_LOSSES = ("balance_loss", "z_loss")


@dataclass(frozen=True)
class ExpertLayers:
    """The routers of the whole model; equal on all ranks.

    The sums of a step are one row for each router: the tokens of its experts, the two losses.
    Routers with unequal numbers of experts are not recorded.

    Args:
        layers: position of the layer of each router, as in the names of its parameters.
        num_experts: experts of each of them.
        losses: the auxiliary losses that have a coefficient; equal in all layers.
    """

    layers: tuple[int, ...] = ()
    num_experts: int = 0
    losses: tuple[str, ...] = ()

    @classmethod
    def of(cls, net: PipelineModule) -> "ExpertLayers":
        """Return the routers of a model."""
        found = [
            (position, module.config)
            for position, layer in enumerate(net.meta_layers)
            for module in layer.modules()
            if isinstance(module, RouterStatistics)
        ]
        sizes = {config.num_experts for _, config in found}
        if len(sizes) != 1:
            return cls()
        config = found[0][1]
        used = zip(_LOSSES, (config.aux_loss_coeff, config.z_loss_coeff), strict=True)
        losses = tuple(name for name, coefficient in used if coefficient)
        return cls(tuple(position for position, _ in found), sizes.pop(), losses)

    def rows(self, sums: Sequence[float]) -> list[list[float]]:
        """Return the sums of each router."""
        width = self.num_experts + len(_LOSSES)
        return [list(sums[start : start + width]) for start in range(0, len(sums), width)]

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the numbers of a step for its record.

        Args:
            sums: the sums over all ranks; empty if they were not to be recorded.
        """
        if not sums:
            return {}
        metrics, names = dict[str, float](), ("load", *self.losses)
        for layer, row in zip(self.layers, self.rows(sums), strict=True):
            tokens = row[: self.num_experts]
            mean = sum(tokens) / self.num_experts
            values = dict(zip(_LOSSES, row[self.num_experts :], strict=True))
            values["load"] = max(tokens) / mean if mean else math.nan
            metrics |= {f"moe/{name}/layer_{layer}": values[name] for name in names}
        load, *losses = (
            [metrics[f"moe/{name}/layer_{layer}"] for layer in self.layers] for name in names
        )
        means = (sum(loss) / len(loss) for loss in losses)
        metrics |= {f"moe/{name}": mean for name, mean in zip(self.losses, means, strict=True)}
        return metrics | {"moe/max_load": max(load)}


class StatisticsUpdates:
    """The updates of the layers on one rank.

    With `pipeline.optimizer_sync: "post_validate"` the report of a step arrives after forwards of
    the next one, so the sums of both steps are separate.

    Args:
        model: the local stages, which contain the layers.
        mesh: the data ranks have copies of the layers; the tensor ranks count the same tokens.
        experts: the routers of all stages.
    """

    def __init__(self, model: LocalModel, mesh: Mesh, experts: ExpertLayers) -> None:
        self._layers, self._data = deferred_statistics(model.stages.values()), mesh.data
        self._mesh, self._experts, self._records = mesh, experts, False
        routers = {
            int(name.split(".")[1]): module
            for stage in model.stages.values()
            for name, module in stage.named_modules()
            if experts.layers and isinstance(module, RouterStatistics)
        }
        self._routers = list(routers.values())
        rows = [experts.layers.index(layer) for layer in routers]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
        # Of the steps without a final report, oldest first.
        self._sums: deque[list[Tensor]] = deque()

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Context of a step: if it fails, a later step does not use its sums."""
        try:
            yield
        except BaseException:
            self._sums.clear()
            self._clear_layers()
            raise

    def _clear_layers(self) -> None:
        for layer in self._layers:
            layer.sums.zero_()
        for router in self._routers if self._records else ():
            router.sums.zero_()
            router.loss_sums.zero_()

    def record_experts(self, records: bool) -> None:
        """Count for `expert_sums` in the next step, or do not."""
        self._records = records and bool(self._experts.layers)
        for router in self._routers:
            router.is_recorded = self._records

    def expert_sums(self, samples: int) -> Tensor | None:
        """Return this rank's part of the sums of `ExpertLayers`; None: they are not recorded.

        Args:
            samples: samples of the step, on all data ranks: the losses are means over them.
        """
        if not self._records:
            return None
        shape = len(self._experts.layers), self._experts.num_experts + len(_LOSSES)
        sums = torch.zeros(shape, dtype=torch.float64, device=self._mesh.device)
        if self._routers and self._mesh.tensor.rank == 0:
            tokens = torch.stack([router.sums for router in self._routers])
            losses = torch.stack([router.loss_sums for router in self._routers]) / samples
            sums[self._rows] = torch.cat([tokens, losses], dim=1)
        return sums.flatten()

    def end_step(self) -> None:
        """Take the sums of a step, after its last forward.  Collective over the data ranks."""
        if not self._layers:
            self._clear_layers()
            return
        sums = torch.cat([layer.sums for layer in self._layers])
        self._clear_layers()
        if self._data.size > 1:
            all_reduce(sums, self._data)
        self._sums.append(list(torch.split(sums, [layer.sums.numel() for layer in self._layers])))

    def on_report(self, report: StepReport) -> None:
        """Update the statistics, unless the oldest step without a report was skipped."""
        if not self._sums:
            return
        for layer, sums in zip(self._layers, self._sums.popleft(), strict=True):
            if not report.skipped:
                layer.update(sums)


def running_statistics_warning(
    net: PipelineModule, config: Config, batch: Batch, *, checkpointing: bool
) -> str | None:
    """Return the warning about training BatchNorm and similar layers; None if all is well.

    Args:
        checkpointing: activations are recomputed.

    Raises:
        ConfigError: a SyncBatchNorm would wait for ranks that do not run it; on every rank.
    """
    layers = list(_layers_with_statistics(net))
    if not layers:
        return None
    names = [f"{name} ({type(module).__name__})" for name, module in layers]
    whole_world = [
        name
        for name, (_, module) in zip(names, layers, strict=True)
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None
    ]
    if whole_world and batch.tensor_size * batch.pipeline_size > 1:
        raise ConfigError(
            f"{listed(whole_world, 8)}: SyncBatchNorm communicates over all ranks, but only the "
            "data ranks of a stage run it: give it a process_group of these ranks, or use "
            "BatchNorm",
            on_every_rank=True,
        )
    problems = []
    if batch.num_microbatches > 1:
        problems.append(
            f"updates running statistics after each of the {batch.num_microbatches} micro-batches "
            f"of a step, from that micro-batch alone"
        )
    if checkpointing:
        problems.append("updates them again when activation checkpointing recomputes a layer")
    if batch.data_size > 1 and not all(isinstance(m, nn.SyncBatchNorm) for _, m in layers):
        problems.append(
            f"has different running statistics on each of the {batch.data_size} data ranks (a run "
            f"on another mesh loads those of data rank 0)"
        )
    if (config.fp16.enabled or config.bf16.enabled) and any(m.affine for _, m in layers):
        narrow = "fp16" if config.fp16.enabled else "bf16"
        problems.append(
            f"may fail with {narrow}.enabled, because its statistics stay in fp32 (torch supports "
            f"this mix on GPUs only)"
        )
    if not problems:
        return None
    return (
        f"{listed(names, 8)}: {type(layers[0][1]).__name__} {'; '.join(problems)}. So evaluation "
        f"differs from that of a model trained on whole batches. To update BatchNorms once per "
        f"step, from the whole batch, set model.batch_norm to 'deferred' if the model type has "
        f"this key, or give PipelineModule(..., deferred_batch_norm=True); GroupNorm and LayerNorm "
        f"have no running statistics"
    )


def _layers_with_statistics(net: PipelineModule) -> Iterator[tuple[str, "nn.BatchNorm1d"]]:
    """Yield (logical name, module) of each module that updates statistics in its forward."""
    for position, layer in enumerate(net.meta_layers):
        for name, module in layer.named_modules(prefix=f"layers.{position}"):
            deferred = isinstance(module, DeferredBatchNorm)
            tracks = getattr(module, "track_running_stats", False) and not deferred
            if isinstance(module, nn.modules.batchnorm._NormBase) and tracks:
                yield name, module  # type: ignore[misc]
