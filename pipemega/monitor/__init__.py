"""The monitor room: what a run says about itself, and where that goes."""

from pipemega.monitor.background import Background
from pipemega.monitor.build import build_sinks
from pipemega.monitor.console import Console, eval_line, parse_line, step_line, timeline_line
from pipemega.monitor.flops import gpt_flops_per_token, peak_tflops, tflops_per_device
from pipemega.monitor.logger import get_logger
from pipemega.monitor.records import EvalRecord, EventRecord, Record, StepRecord, TimelineRecord
from pipemega.monitor.sinks import (
    CsvSink,
    JsonLinesSink,
    Monitor,
    ResumePoint,
    Sink,
    TensorboardSink,
)
from pipemega.monitor.timers import MultiTimer, Timer, breakdown_line, breakdown_scalars
from pipemega.monitor.wandb_sink import WandbSink

__all__ = [
    "Background",
    "Console",
    "CsvSink",
    "EvalRecord",
    "EventRecord",
    "JsonLinesSink",
    "Monitor",
    "MultiTimer",
    "Record",
    "ResumePoint",
    "Sink",
    "StepRecord",
    "TensorboardSink",
    "TimelineRecord",
    "Timer",
    "WandbSink",
    "breakdown_line",
    "breakdown_scalars",
    "build_sinks",
    "eval_line",
    "get_logger",
    "gpt_flops_per_token",
    "parse_line",
    "peak_tflops",
    "step_line",
    "tflops_per_device",
    "timeline_line",
]
