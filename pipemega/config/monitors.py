"""`monitor`, `tensorboard`, `wandb`, `csv_monitor`, `timers`: metrics and where they go."""

from typing import Any, Literal

from pipemega.config.key_kinds import Section, honoured, ignored, own, section
from pipemega.config.value_types import Count, Name, Positive, Whole


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
