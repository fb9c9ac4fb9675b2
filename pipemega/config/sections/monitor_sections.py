"""`monitor`, `tensorboard`, `wandb`, `csv_monitor`, `timers`: metrics and where they go.

`flops_profiler`: DeepSpeed's table of the costs of modules.

`comms_logger`: a table of the collectives and messages of one step.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipemega.config.declarations import (
    Count,
    Name,
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    own,
    rule,
    section,
)


class TraceSection(Section):
    """Steps whose instructions are timed; `[1, 10]` is short for `{"steps": [1, 10]}`."""

    steps: tuple[Count, ...] = own((), "Numbers of the steps to time; the first step is 1.")
    every: Whole = own(0, "Also time each step divisible by this; 0: only `steps`.")
    memory: bool = own(False, "Also measure the memory of each instruction (slow on a CPU).")
    folder: Name | None = own(None, "Folder of timelines; null: `timelines` in the run folder.")

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return {"steps": raw} if isinstance(raw, list | tuple) else raw


class MonitorSection(Section):
    """Metrics that every run records."""

    jsonl: Name | None = own(None, "JSON-lines file; null: `metrics.jsonl` in the run folder.")
    metric_names: Literal["grouped", "deepspeed"] = own(
        "grouped",
        "Names in CSV files, TensorBoard and wandb: `train/loss`, or DeepSpeed's "
        "`Train/Samples/train_loss`.",
    )
    peak_tflops: Positive | None = own(
        None, "Peak TFLOP/s of one device, for MFU; null: looked up by the device's name."
    )
    log_params_norm: bool = own(
        False, "Record the norm of all parameters after each step (`params_norm`)."
    )
    log_num_zeros_in_grad: bool = own(
        False, "Record how many elements of the gradients are 0 in each step (`num_zeros`)."
    )
    trace: TraceSection = section(TraceSection, "Measured timelines of single steps.", own=True)


class LoggingSection(Section):
    """Messages of the Python logger `pipemega`."""

    level: Literal["debug", "info", "warning", "error"] = own("info", "Lowest level to log.")
    ranks: tuple[Whole, ...] | Literal["all"] = own(
        (0,), "Ranks that show messages of `level`; the others show only warnings and errors."
    )
    log_to_file: Name | None = own(
        None,
        "Folder of log files: each rank appends its messages to `rank_N.log`, rank 0 also the "
        "lines of the console; null: no files.",
    )
    file_ranks: tuple[Whole, ...] | Literal["all"] = own("all", "Ranks that write a log file.")

    def writes_file(self, rank: int) -> bool:
        """Return whether the rank writes a log file, if there are any."""
        return self.file_ranks == "all" or rank in self.file_ranks


class TensorboardSection(Section):
    """TensorBoard event files."""

    enabled: bool = honoured(False, "Write TensorBoard event files.")
    output_path: str = honoured("", "Folder; empty: `tensorboard` in the run folder.")
    job_name: Name = honoured("pipemega", "Name of the run: a subfolder of `output_path`.")


class CsvSection(Section):
    """CSV files, one per metric."""

    enabled: bool = honoured(False, "Write CSV files.")
    output_path: str = honoured("", "Folder; empty: `csv` in the run folder.")
    job_name: Name = honoured("pipemega", "Name of the run: a subfolder of `output_path`.")


class WandbSection(Section):
    """Weights & Biases; offline if there is no API key or no network."""

    enabled: bool = honoured(False, "Log to Weights & Biases.")
    group: Name | None = honoured(None, "Group of runs that this run belongs to.")
    team: Name | None = honoured(None, "Team (wandb's `entity`).")
    project: Name = honoured("pipemega", "Project.")
    name: Name | None = own(None, "Name of the run; null: the name of the run folder.")
    id: Name | None = own(None, "Run id; a resumed run uses the id in the checkpoint.")
    tags: tuple[Name, ...] | None = own(None, "Tags of the run.")
    mode: Literal["online", "offline", "shared", "disabled"] | None = own(
        None, "wandb's mode; null: the one from wandb's own settings."
    )
    resume: Literal["allow", "must", "never", "auto"] | None = own(
        None, 'What to do if a run with this `id` exists (wandb\'s `resume`); null: "allow".'
    )
    dir: Name | None = own(None, "Folder for wandb's files; null: the run folder.")


class ThroughputSection(Section):
    """DeepSpeed's throughput timer."""

    enabled: bool = ignored(
        True, "Measure samples per second.", "throughput is always measured", agrees=[True]
    )
    synchronized: bool = ignored(
        True,
        "Synchronize with the device before the clock is read.",
        "the clock is read once per step, after the device has finished",
        agrees=[True],
    )


class TimersSection(Section):
    """DeepSpeed's timers."""

    throughput: ThroughputSection = section(ThroughputSection, "Throughput timer.")


class FlopsProfilerSection(Section):
    """A table of parameters, FLOPs and forward times of the modules, printed once."""

    enabled: bool = honoured(False, "Profile the modules in one training step.")
    profile_step: Whole = honoured(
        1,
        "Number of the step to profile; 0 and 1 are the first step, whose times may include "
        "warm-up.",
    )
    module_depth: Annotated[int, Field(ge=-1)] = honoured(
        -1, "Deepest level of modules in the table; the whole model is level 0; -1: all levels."
    )
    top_modules: Whole = honoured(1, "Number of classes of modules to list for each level.")
    detailed: bool = honoured(True, "Also list every module.")
    recompute_fwd_factor: NotNegative = honoured(
        0.0, "Share of the forward that activation checkpointing repeats in backward."
    )
    output_file: str | None = honoured(
        None, "File for the table, instead of standard output; written by rank 0."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # Older configs could contain the section as true, false or null.
        if raw is None or isinstance(raw, bool):
            return {"enabled": bool(raw)}
        return raw


def warnings_of_profiling(config: Any) -> Iterator[str]:
    """Yield a warning if a `Config` profiles a step that the run does not have."""
    section, training = config.flops_profiler, config.training
    if not section.enabled or not training.has_length:
        return
    # More data ranks have as many steps, or fewer.
    steps = config.batch_sizes(config.smallest_data_size).run_length(training).steps
    if steps is not None and section.profile_step > steps:
        in_samples = training.train_samples is not None
        length = f"train_samples are {steps} steps" if in_samples else f"train_steps {steps}"
        yield (
            f"flops_profiler.profile_step ({section.profile_step}) is after the last step "
            f"(training.{length}): no step will be profiled"
        )


# DeepSpeed's names of operations -> ours; the empty ones do not occur in a step.
OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    **dict.fromkeys(
        ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "allgather_fn"),
        "all_gather",
    ),
    **dict.fromkeys(
        ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_fn"), "reduce_scatter"
    ),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("send", "isend"), "send"),
    **dict.fromkeys(("recv", "irecv"), "recv"),
    **dict.fromkeys(("send_recv", "batch_isend_irecv"), "send_recv"),
    "broadcast": "broadcast",
    **dict.fromkeys(
        (
            "barrier", "monitored_barrier", "reduce", "gather", "scatter", "all_gather_object",
            "broadcast_object_list",
        ),
        "",
    ),
}  # fmt: skip


class CommsLoggerSection(Section):
    """The communication of one step: calls, bytes, times and bandwidths, once in the log."""

    enabled: bool = honoured(
        False, "Log a table of the communication of step `comms_logger.profile_step`."
    )
    profile_step: Count = own(
        2, "The step that is recorded, counted from the start of the program, also if it resumes."
    )
    verbose: bool = honoured(False, "One line for each message size, not one for each operation.")
    prof_all: bool = honoured(True, "Record all operations; false: only `prof_ops`.")
    prof_ops: tuple[Name, ...] = honoured(
        (), "DeepSpeed's names of operations to record, such as `all_reduce`, `isend`."
    )
    debug: bool = ignored(
        False, "Add the calling function to each name.", "the table names the mesh axis instead"
    )

    @rule("prof_ops")
    def _prof_ops_are_known(self) -> Iterator[str]:
        unknown = [name for name in self.prof_ops if name not in OPERATIONS]
        if unknown:
            yield (
                f"comms_logger.prof_ops has {unknown[0]!r}, which is no operation; the operations "
                f"are {', '.join(OPERATIONS)}"
            )

    def remarks(self) -> Iterable[str]:
        if self.enabled and not self.prof_all and not self.prof_ops:
            yield (
                "comms_logger records nothing, because comms_logger.prof_all is false and "
                "comms_logger.prof_ops is empty: name the operations to record, or set prof_all "
                "to true"
            )


class MonitorKeys(Section):
    """What a run records, and where. `monitor.build_sinks` has an entry for each of the sinks."""

    SINKS: ClassVar = ("tensorboard", "wandb", "csv_monitor")

    monitor: MonitorSection = section(MonitorSection, "Metrics that every run records.", own=True)
    logging: LoggingSection = section(LoggingSection, "Messages of the logger.", own=True)
    tensorboard: TensorboardSection = section(TensorboardSection, "TensorBoard.")
    wandb: WandbSection = section(WandbSection, "Weights & Biases.")
    csv_monitor: CsvSection = section(CsvSection, "CSV files.")

    @property
    def has_sinks(self) -> bool:
        """Whether a sink is enabled."""
        return any(getattr(self, name).enabled for name in self.SINKS)
