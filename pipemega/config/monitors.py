"""`monitor`, `tensorboard`, `wandb`, `csv_monitor`, `timers`: what a run tells.  Floor 1."""

from typing import Any, Literal

from pipemega.config.keys import (
    Count,
    Name,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    own,
    section,
)


class TraceSection(Section):
    """Which steps are timed instruction by instruction; a list is short for `{"steps": [...]}`."""

    steps: tuple[Count, ...] = own((), "Numbers of the steps to time, the first one being 1.")
    every: Whole = own(0, "Time every step whose number is a multiple of this; 0: none but those.")
    memory: bool = own(
        False, "Also weigh what each instruction leaves in memory, which takes longer on a CPU."
    )
    folder: Name | None = own(
        None, "Where the timelines are written; null: `timelines` in the folder of the run."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        return {"steps": raw} if isinstance(raw, list | tuple) else raw


class MonitorSection(Section):
    """What is recorded of every run."""

    jsonl: Name | None = own(
        None, "File of the JSON lines; null: `metrics.jsonl` in the folder of the run."
    )
    peak_tflops: Positive | None = own(
        None, "Peak of one device, for MFU; null: that of the device, where it is known."
    )
    trace: TraceSection = section(
        TraceSection, "Timelines of single steps, measured and simulated.", own=True
    )


class TensorboardSection(Section):
    """Event files for TensorBoard."""

    enabled: bool = honoured(False, "Write them.")
    output_path: str = honoured("", "Folder; empty: `tensorboard` in the folder of the run.")
    job_name: Name = honoured("pipemega", "Folder below it, the name of the run.")


class CsvSection(Section):
    """A CSV file per tag."""

    enabled: bool = honoured(False, "Write them.")
    output_path: str = honoured("", "Folder; empty: `csv` in the folder of the run.")
    job_name: Name = honoured("pipemega", "Folder below it, the name of the run.")


class WandbSection(Section):
    """Weights & Biases; offline where there is no key or no network."""

    enabled: bool = honoured(False, "Log to it.")
    group: Name | None = honoured(None, "Group of the run.")
    team: Name | None = honoured(None, "The team (entity) that it belongs to.")
    project: Name = honoured("pipemega", "Its project.")
    name: Name | None = own(None, "Name of the run.")
    id: Name | None = own(None, "Id of the run; that in a checkpoint goes before.")
    tags: tuple[Name, ...] | None = own(None, "Its tags.")
    mode: Literal["online", "offline", "shared", "disabled"] | None = own(
        None, "null: what wandb itself is set up for."
    )
    resume: Literal["allow", "must", "never", "auto"] | None = own(
        None, 'What to do about a run of that id; null: "allow".'
    )
    dir: Name | None = own(None, "Folder of its files; null: the folder of the run.")


class ThroughputSection(Section):
    """DeepSpeed's `timers.throughput`."""

    enabled: bool = ignored(
        True, "Measure samples per second.", "it is always measured", agrees=[True]
    )
    synchronized: bool = ignored(
        True,
        "Wait for the device before the clock is read.",
        "the clock is read once a step, when the device has finished",
        agrees=[True],
    )


class TimersSection(Section):
    """DeepSpeed's `timers`."""

    throughput: ThroughputSection = section(ThroughputSection, "Samples and tokens per second.")
