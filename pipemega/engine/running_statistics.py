"""Warns about layers with running statistics, which micro-batches and data ranks update apart.

Updates the statistics of DeferredBatchNorms and of the routers of experts, once for each step that
is not skipped.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipemega.config import Batch, Config
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.optimizer import StepReport
from pipemega.pipeline.model.batch_norm import DeferredBatchNorm, deferred_statistics
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import LocalModel
from pipemega.printing import listed


class StatisticsUpdates:
    """The updates of the layers on one rank.

    With `pipeline.optimizer_sync: "post_validate"` the report of a step arrives after forwards of
    the next one, so the sums of both steps are separate.

    Args:
        model: the local stages, which contain the layers.
        data: the data axis, whose ranks have copies of the layers.
    """

    def __init__(self, model: LocalModel, data: Axis) -> None:
        self._layers, self._data = deferred_statistics(model.stages.values()), data
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

    def end_step(self) -> None:
        """Take the sums of a step, after its last forward.  Collective over the data ranks."""
        if not self._layers:
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
