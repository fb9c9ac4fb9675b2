"""Warns about layers with running statistics, which micro-batches and data ranks update apart."""

from collections.abc import Iterator

from torch import nn

from pipemega.config import Batch, Config
from pipemega.errors import ConfigError
from pipemega.pipeline.deferred_batch_norm import DeferredBatchNorm
from pipemega.pipeline.module import PipelineModule

# Number of layers that a message names.
_NAMED = 8


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
            f"{_listed(whole_world)}: SyncBatchNorm communicates over all ranks, but only the data "
            f"ranks of a stage run it: give it a process_group of these ranks, or use BatchNorm",
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
        f"{_listed(names)}: {type(layers[0][1]).__name__} {'; '.join(problems)}. So evaluation "
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
