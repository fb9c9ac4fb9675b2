"""From the configuration to the sinks that it asks for."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.monitor.background import CLOSE_SECONDS, Background
from pipemega.monitor.console import Console
from pipemega.monitor.sinks import (
    CsvSink,
    JsonLinesSink,
    Monitor,
    ResumePoint,
    Sink,
    State,
    TensorboardSink,
)
from pipemega.monitor.wandb_sink import WandbSink


def build_sinks(
    config: Any,
    run_folder: str | Path,
    *,
    is_main: bool,
    logger: logging.Logger,
    resume: ResumePoint | None = None,
    state: Mapping[str, State] | None = None,
) -> Monitor:
    """The monitor of this rank: console and JSON lines always, the others where enabled.

    The others work in threads of their own, so that a server that is gone, or a slow disk, does not
    hold up the run.

    Args:
        config: a `pipemega.config.Config`; read by attribute names alone: steps_per_print,
            training, mesh, monitor, csv_monitor, tensorboard, wandb, and model_dump().
        run_folder: where a path that the configuration leaves open begins.
        is_main: True on one rank of the world; the others get a monitor without sinks, and
            touch no file.
        logger: takes the reports of sinks that fail.
        resume: the point that a resumed run goes on from; None for a new run.
        state: `Monitor.state_dict()` from the checkpoint.

    Raises:
        ConfigError: a sink that was asked for needs a package that is not installed.
    """
    if not is_main:
        return Monitor([], logger, state)
    run_folder = Path(run_folder)
    makers: list[Callable[[], Sink]] = [partial(_console, config)]
    # What follows the end of the run, all ranks do together: they wait no longer than this.
    apart = partial(_apart, min(CLOSE_SECONDS, config.mesh.timeout_seconds / 4))
    jsonl = config.monitor.jsonl or run_folder / "metrics.jsonl"
    makers.append(partial(JsonLinesSink, jsonl, resume))
    if config.csv_monitor.enabled:
        folder = _job_folder(config.csv_monitor, run_folder / "csv")
        makers.append(partial(apart, CsvSink, folder, resume))
    if config.tensorboard.enabled:
        folder = _job_folder(config.tensorboard, run_folder / "tensorboard")
        makers.append(partial(apart, TensorboardSink, folder, resume))
    if config.wandb.enabled:
        run_id = (state or {}).get(WandbSink.name, {}).get("id")
        makers.append(partial(apart, _wandb, config, run_folder, run_id, logger))
    made = [_made(maker, logger) for maker in makers]
    return Monitor([sink for sink in made if sink is not None], logger, state)


def _made(maker: Callable[[], Sink], logger: logging.Logger) -> Sink | None:
    """The sink, or None and a report: a log that cannot be written is no reason not to train."""
    try:
        return maker()
    except ConfigError:
        raise
    except Exception as error:
        logger.warning(
            "a monitor could not be opened and is off for this run: %s: %s",
            type(error).__name__,
            error,
        )
        return None


def _apart(close_seconds: float, make: Callable[..., Sink], *arguments: Any) -> Sink:
    """The sink in a thread of its own; that a package is missing is said at once."""
    return Background(make(*arguments), close_seconds=close_seconds)


def _job_folder(section: Any, default: Path) -> Path:
    """DeepSpeed's output_path/job_name; an empty output_path is our own folder, not the cwd."""
    return Path(section.output_path or default, section.job_name)


def _console(config: Any) -> Console:
    return Console(
        config.training.train_steps, config.steps_per_print, progress=config.training.progress
    )


def _wandb(config: Any, run_folder: Path, run_id: str | None, logger: logging.Logger) -> WandbSink:
    section = config.wandb
    return WandbSink(
        section.dir or run_folder,
        logger=logger,
        config=config.model_dump(mode="json"),
        mode=section.mode,
        project=section.project,
        entity=section.team,
        group=section.group,
        run_name=section.name,
        tags=section.tags or (),
        # The run of the checkpoint goes before the id in the file, which may be an older one's.
        run_id=run_id or section.id,
        resume=section.resume or "allow",
    )
