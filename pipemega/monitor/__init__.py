"""Monitoring: records of a run, and the sinks that write them.

records          step, epoch, evaluation, timeline, picture, event, sample records; names, FLOPs
sinks            JSON lines, CSV, TensorBoard; Monitor, which combines sinks; a sink in a thread
wandb_sink       Weights & Biases; console: progress bar and lines
build_sinks      the sinks that a config enables
timers           stopwatches, the phases of a step; logger: the logger of a rank
"""

from pipemega.monitor.build_sinks import build_sinks
from pipemega.monitor.console import (
    Console,
    epoch_line,
    eval_line,
    parse_line,
    print_table,
    step_line,
    timeline_line,
)
from pipemega.monitor.logger import (
    RankLogger,
    configure_logging,
    get_logger,
    write_to_log_file,
)
from pipemega.monitor.records import (
    EpochRecord,
    EvalRecord,
    EventRecord,
    PictureRecord,
    Record,
    SampleRecord,
    ScalarRecord,
    StepRecord,
    TimelineRecord,
    evaluation_values,
    gpt_flops_per_token,
    peak_tflops,
    tflops_per_device,
)
from pipemega.monitor.sinks import (
    BackgroundSink,
    CsvSink,
    JsonLinesSink,
    Monitor,
    ResumePoint,
    Sink,
    TensorboardSink,
)
from pipemega.monitor.timers import (
    MultiTimer,
    Phase,
    StepPhases,
    Timer,
    breakdown_line,
    breakdown_scalars,
)
from pipemega.monitor.wandb_sink import WandbOptions, WandbSink

__all__ = [
    "BackgroundSink",
    "Console",
    "CsvSink",
    "EpochRecord",
    "EvalRecord",
    "EventRecord",
    "JsonLinesSink",
    "Monitor",
    "MultiTimer",
    "Phase",
    "PictureRecord",
    "RankLogger",
    "Record",
    "ResumePoint",
    "SampleRecord",
    "ScalarRecord",
    "Sink",
    "StepPhases",
    "StepRecord",
    "TensorboardSink",
    "TimelineRecord",
    "Timer",
    "WandbOptions",
    "WandbSink",
    "breakdown_line",
    "breakdown_scalars",
    "build_sinks",
    "configure_logging",
    "epoch_line",
    "eval_line",
    "evaluation_values",
    "get_logger",
    "gpt_flops_per_token",
    "parse_line",
    "peak_tflops",
    "print_table",
    "step_line",
    "tflops_per_device",
    "timeline_line",
    "write_to_log_file",
]
