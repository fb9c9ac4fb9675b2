"""Names of the metrics in CSV files, TensorBoard and wandb: grouped, or DeepSpeed's.

    grouped (default)       monitor.metric_names "deepspeed"
    train/loss              Train/Samples/train_loss
    eval/loss               Train/Samples/eval_loss
    perf/forward_ms         Train/Samples/elapsed_time_ms_forward
    memory/peak_gib         Train/Samples/peak_gib

The last part of a grouped name is the name of the field in `metrics.jsonl`.
"""

from collections.abc import Mapping
from typing import Literal

MetricNames = Literal["grouped", "deepspeed"]

GROUPS = ("train", "epoch", "eval", "test", "perf", "memory", "event")
DEEPSPEED_PREFIX = "Train/Samples/"

# Where DeepSpeed's name is not the last part of ours. DeepSpeed calls the optimizer's part of a
# step "step", and the communication of gradients "backward_allreduce".
_DEEPSPEED = {
    "train/loss": "train_loss",
    "eval/loss": "eval_loss",
    "eval/perplexity": "eval_perplexity",
    "test/loss": "test_loss",
    "test/perplexity": "test_perplexity",
    "epoch/loss": "epoch_loss",
    "epoch/seconds": "epoch_seconds",
    "epoch/samples_per_second": "epoch_samples_per_second",
    "perf/data_ms": "elapsed_time_ms_data",
    "perf/forward_ms": "elapsed_time_ms_forward",
    "perf/backward_ms": "elapsed_time_ms_backward",
    "perf/communication_ms": "elapsed_time_ms_backward_allreduce",
    "perf/optimizer_ms": "elapsed_time_ms_step",
}

_PERFORMANCE = {
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
}


def step_metric(name: str) -> str:
    """Return the grouped name of a field of a step; a name with "/" is one already."""
    if "/" in name:
        return name
    if name in _PERFORMANCE or name.startswith("work_"):
        return f"perf/{name}"
    return f"memory/{name}" if name.endswith("_gib") else f"train/{name}"


def in_names(names: MetricNames, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with grouped names under the names of the config."""
    return {metric_name(names, name): value for name, value in scalars.items()}


def metric_name(names: MetricNames, name: str) -> str:
    """Return the name of the metric with the grouped name `name`; other names stay."""
    group, _, rest = name.partition("/")
    if names == "grouped" or group not in GROUPS:
        return name
    return DEEPSPEED_PREFIX + _DEEPSPEED.get(name, rest)


def name_patterns(names: MetricNames) -> tuple[str, ...]:
    """Return patterns that match the names of all metrics."""
    if names == "deepspeed":
        return (DEEPSPEED_PREFIX + "*",)
    return tuple(f"{group}/*" for group in GROUPS)
