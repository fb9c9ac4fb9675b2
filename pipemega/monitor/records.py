"""Records of a run: one per step, epoch, evaluation, timeline, picture, event and sample text.

FLOPs of a model, and the peak FLOP/s of devices.

Names of the metrics in CSV files, TensorBoard and wandb: grouped, or DeepSpeed's.

    grouped (default)       monitor.metric_names "deepspeed"
    train/loss              Train/Samples/train_loss
    eval/loss               Train/Samples/eval_loss
    perf/forward_ms         Train/Samples/elapsed_time_ms_forward
    memory/peak_gib         Train/Samples/peak_gib

The last part of a grouped name is the name of the field in `metrics.jsonl`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

# Peak of dense bf16 matrix products in TFLOP/s, from the manufacturers' data sheets, by a part of
# torch.cuda.get_device_name(). The first match counts, so more specific names come first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("MIG", 0.0),  # part of a device; its name does not give its FLOP/s
    ("A100", 312.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200 NVL", 835.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("B200", 2250.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s; None if it is not in the table.

    For an unknown device no MFU is reported, unless `monitor.peak_tflops` gives its peak.
    """
    for part, peak in PEAK_TFLOPS:
        if part in device_name:
            return peak or None
    return None


def gpt_flops_per_token(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    ffn_hidden_size: float,
    seq_length: int,
    vocab_size: int,
    num_query_groups: int | None = None,
    kv_channels: int | None = None,
    swiglu: bool = False,
) -> float:
    """Return the model FLOPs of forward and backward per token of a GPT.

    A product of [m, k] and [k, n] takes 2mkn; backward computes two such products (gradients of
    input and weight), hence 6 per weight and token:

        6 * ( L * ( h (q + 2 g) + q h        query, key, value; output
                  + q s                      scores and weighted values, 2 * q * s/2: causal
                  + (2 or 3) h f )           feed-forward; 3 with SwiGLU's gate
            + h V )                          head, tied or not

    with q = heads * channels, g = query groups * channels, f = ffn_hidden_size.  Embeddings,
    norms and the recomputation of activation checkpointing are not counted.

    Args:
        ffn_hidden_size: hidden width of the feed-forward block; with SwiGLU, the width of one half;
            with experts, the sum of the experts of a token, as a mean over the layers.
        vocab_size: rows of the head.  Megatron counts the padded ones.
        num_query_groups: heads of key and value; None: as many as query heads.
        kv_channels: size of one head; None: hidden_size / num_attention_heads.

    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; with the causal half and grouped
    queries as Megatron-LM counts them today.
    """
    channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
    groups = num_attention_heads if num_query_groups is None else num_query_groups
    query, key = channels * num_attention_heads, channels * groups
    projections = hidden_size * (query + 2 * key) + query * hidden_size
    feed_forward = (3 if swiglu else 2) * hidden_size * ffn_hidden_size
    layer = projections + query * seq_length + feed_forward
    return 6.0 * (num_layers * layer + hidden_size * vocab_size)


def tflops_per_device(flops: float, seconds: float, num_devices: int) -> float:
    """Return the TFLOP/s per device from the FLOPs and seconds of a whole step."""
    return flops / seconds / num_devices / 1e12


MetricNames = Literal["grouped", "deepspeed"]

GROUPS = ("train", "epoch", "eval", "test", "perf", "memory", "moe", "event")
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


# Fields of a step that are drawn as no curve of their own.
_NO_CURVES = ("step", "consumed_samples", "epoch", "extra")

# Sets whose lines in `metrics.jsonl` have a kind of their own, and their groups in plots. Those of
# other sets have the kind "evaluation", and the group eval/<name>.
_GROUPS = {"validation": "eval", "test": "test"}

_NO_EXTRAS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step; equal on all ranks.

    None means "unknown" and is left out of plots; NaN is a value and is shown.

    Args:
        step: the number of this step, from 1; skipped steps count.
        consumed_samples: samples of the whole run, this step included.
        consumed_tokens: likewise, in tokens; None for data without tokens.
        loss: mean loss of the step.
        lr: learning rate of the step.
        grad_norm: norm over the logical parameters, before clipping.
        loss_scale: the fp16 loss scale; None without fp16.
        step_seconds: wall-clock time of the step.
        samples_per_second, tokens_per_second: throughput of all ranks together.
        epoch: the epoch that the step belongs to, from 1; None if the run has no epochs.
        tflops_per_device: model FLOPs per second and device / 1e12; recompute does not count.
        mfu: tflops_per_device over the device's peak, 0 to 1.
        skipped_steps: steps of the run so far that changed no parameter (fp16 overflow).
        num_zeros: elements of the gradients that are 0; None: not counted.
        params_norm: norm of all logical parameters after the step; None: not computed.
        nan_steps: steps of the run so far with a loss or a gradient norm that is not finite.
        peak_gib: peak memory, the maximum over ranks.
        extra: more numbers by name; a name without "/" gets the group "train".
    """

    step: int
    consumed_samples: int
    loss: float
    lr: float
    step_seconds: float
    samples_per_second: float
    consumed_tokens: int | None = None
    tokens_per_second: float | None = None
    epoch: int | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    skipped_steps: int = 0
    nan_steps: int = 0
    peak_gib: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    extra: Mapping[str, float] = field(default_factory=lambda: _NO_EXTRAS)

    kind: ClassVar[str] = "train"

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value} for plots; unknown values are left out."""
        fields = {k: v for k, v in self.__dict__.items() if k not in _NO_CURVES and v is not None}
        return {step_metric(name): value for name, value in (fields | dict(self.extra)).items()}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON; unknown values are None."""
        return {"kind": self.kind} | self.__dict__ | {"extra": dict(self.extra)}


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch of training: a pass over the training data.

    Args:
        step: last step of the epoch.
        consumed_samples: samples of the whole run, this epoch included.
        epoch: number of the epoch, from 1.
        steps, samples: numbers of steps and samples of this epoch.
        loss: mean over the samples of this epoch, without steps whose loss is inf or nan.
        seconds: wall-clock time of its training steps, without evaluations and saves.
        tokens_per_second: tokens per second; None for data without tokens.
    """

    step: int
    consumed_samples: int
    epoch: int
    steps: int
    samples: int
    loss: float
    seconds: float
    tokens_per_second: float | None = None

    kind: ClassVar[str] = "epoch"

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value}."""
        return {
            "epoch/epoch": self.epoch,
            "epoch/loss": self.loss,
            "epoch/seconds": self.seconds,
            "epoch/samples_per_second": self.samples_per_second,
        }

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON; unknown values are None."""
        rate = {"samples_per_second": self.samples_per_second}
        return {"kind": self.kind} | self.__dict__ | rate


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One pass over held-out data.

    Args:
        step: the last training step before it.
        consumed_samples: training samples so far.
        loss: mean loss over the pass.
        seconds: wall-clock time of the pass.
        split: name of the data: "validation", "test", or another.
        has_tokens: the loss is a loss per token, so that its exponential is a perplexity.
        metrics: other numbers about the pass, by name.
    """

    step: int
    consumed_samples: int
    loss: float
    seconds: float
    split: str = "validation"
    has_tokens: bool = False
    metrics: Mapping[str, float] = field(default_factory=lambda: _NO_EXTRAS)

    @property
    def kind(self) -> str:
        return self.split if self.split in _GROUPS else "evaluation"

    @property
    def values(self) -> dict[str, float]:
        """See `evaluation_values`."""
        return evaluation_values(self.loss, self.metrics, has_tokens=self.has_tokens)

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value}."""
        group = _GROUPS.get(self.split, f"eval/{self.split}")
        return {f"{group}/{name}": value for name, value in self.values.items()}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON."""
        return {
            "kind": self.kind,
            "split": self.split,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            **self.values,
            "seconds": self.seconds,
        }


def evaluation_values(
    loss: float, metrics: Mapping[str, float], *, has_tokens: bool
) -> dict[str, float]:
    """Return the values of an evaluation by name.

    The loss, the perplexity of tokens (inf if it overflows a float), and the metrics.
    """
    values = {"loss": loss}
    if has_tokens:
        try:
            values["perplexity"] = math.exp(loss)
        except OverflowError:
            values["perplexity"] = math.inf
    return values | dict(metrics)


@dataclass(frozen=True, kw_only=True)
class TimelineRecord:
    """One step in which each instruction was timed.

    Args:
        step: the number of the step.
        consumed_samples: samples of the run, this step included.
        schedule: name of the pipeline schedule.
        makespan: seconds from the first instruction of any rank to the last.
        span: seconds from a rank's first instruction to its last; the maximum over ranks.
        bubble: idle share of the makespan, the mean over ranks, 0 to 1.
        predicted_makespan: makespan of the simulator with the measured costs of this step.
        busy, waited: seconds of each rank in computation, and waiting for messages.
        picture: a PNG file of the timeline; None if none was drawn.
    """

    step: int
    consumed_samples: int
    schedule: str
    makespan: float
    span: float
    bubble: float
    predicted_makespan: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    picture: Path | None = None

    kind: ClassVar[str] = "timeline"
    picture_name: ClassVar[str] = "perf/timeline"

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value}; the numbers per rank are only in `row`."""
        return {
            "perf/pipeline_makespan": self.makespan,
            "perf/pipeline_span": self.span,
            "perf/pipeline_bubble": self.bubble,
            "perf/pipeline_predicted_makespan": self.predicted_makespan,
        }

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON; the picture as a path."""
        picture = None if self.picture is None else str(self.picture)
        return {"kind": self.kind} | self.__dict__ | {"picture": picture}


@dataclass(frozen=True, kw_only=True)
class PictureRecord:
    """A picture of the steps so far.

    Args:
        step: the last step in it.
        consumed_samples: samples of the run so far.
        picture_name: grouped name of the picture.
        picture: a PNG file.
    """

    step: int
    consumed_samples: int
    picture_name: str
    picture: Path

    kind: ClassVar[str] = "picture"

    def scalars(self) -> dict[str, float]:
        """Return {}: a picture has no numbers."""
        return {}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON; the picture as a path."""
        return {"kind": self.kind} | self.__dict__ | {"picture": str(self.picture)}


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """An event of the run.

    Args:
        step: the step in which, or after which, it happened.
        consumed_samples: samples of the run so far.
        name: "loss_spike", "nonfinite", "rollback", "straggler", "stop".
        values: numbers of the event, by name.
        text: the event as a sentence.
    """

    step: int
    consumed_samples: int
    name: str
    values: Mapping[str, float]
    text: str

    kind: ClassVar[str] = "event"

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value}."""
        return {f"event/{self.name}_{key}": value for key, value in self.values.items()}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON."""
        return {"kind": self.kind} | self.__dict__ | {"values": dict(self.values)}


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A text that the model has generated.

    Args:
        step: the last training step before it.
        consumed_samples: samples of the run so far.
        prompt, text: what the model was given, and what it generated.
    """

    step: int
    consumed_samples: int
    prompt: str
    text: str

    kind: ClassVar[str] = "sample"

    def scalars(self) -> dict[str, float]:
        """Return {}: a text has no numbers."""
        return {}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON."""
        return {"kind": self.kind} | self.__dict__


@dataclass(frozen=True, kw_only=True)
class ScalarRecord:
    """Numbers that a callback or the user's own loop records.

    Args:
        step: the last training step before it.
        consumed_samples: samples of the run so far.
        values: numbers by name; a name without "/" gets the group "train".
    """

    step: int
    consumed_samples: int
    values: Mapping[str, float]

    kind: ClassVar[str] = "scalars"

    def scalars(self) -> dict[str, float]:
        """Return {grouped name: value}."""
        return {name if "/" in name else f"train/{name}": v for name, v in self.values.items()}

    def row(self) -> dict[str, object]:
        """Return the fields by name, for a line of JSON."""
        return {"kind": self.kind} | self.__dict__ | {"values": dict(self.values)}


Record = (
    StepRecord
    | EpochRecord
    | EvalRecord
    | TimelineRecord
    | PictureRecord
    | EventRecord
    | SampleRecord
    | ScalarRecord
)
