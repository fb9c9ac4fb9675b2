"""Builds the sinks that a config enables."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.monitor.sinks import (
    CLOSE_SECONDS,
    FILE_SINKS,
    BackgroundSink,
    JsonLinesSink,
    Monitor,
    ResumePoint,
    Sink,
    State,
)
from pipemega.monitor.wandb_sink import WandbOptions, WandbSink


def build_sinks(
    config: Any,
    run_folder: str | Path | None,
    console: Callable[[], Sink],
    *,
    logger: logging.Logger,
    resume: ResumePoint | None = None,
    state: Mapping[str, State] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Monitor:
    """Return the monitor of rank 0: console, JSON lines, and the sinks that are enabled.

    The enabled sinks run in threads, so that an unreachable server or a slow disk does not delay
    the run.

    Args:
        config: a `pipemega.config.Config`; only these attributes are read: mesh, monitor,
            csv_monitor, tensorboard, wandb, and to_dict().
        run_folder: base folder of the paths that the config does not set; None: write no file.
        console: builds the console.
        logger: logs the sinks that fail.
        resume: the last step of the checkpoint that the run resumes from; None for a new run.
        state: `Monitor.state_dict()` from the checkpoint.
        facts: facts about the run that wandb shows beside the config: mesh, number of parameters.

    Raises:
        ConfigError: an enabled sink needs a package that is not installed.
    """
    builders = [console]
    if run_folder is not None:
        builders += _file_sinks(config, Path(run_folder), resume)
        if config.wandb.enabled:
            saved = (state or {}).get(WandbSink.name, {})
            builders.append(lambda: _wandb(config, Path(run_folder), saved, logger, facts or {}))
    sinks: list[Sink] = []
    for builder in builders:
        try:
            sinks.append(builder())
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("a monitor could not be opened and is off for this run: %s", reason)
    return Monitor(sinks, logger, state)


def _file_sinks(
    config: Any, run_folder: Path, resume: ResumePoint | None
) -> list[Callable[[], Sink]]:
    """Return functions that build the sinks that write files."""
    names = config.monitor.metric_names
    path = config.monitor.jsonl or run_folder / "metrics.jsonl"
    builders: list[Callable[[], Sink]] = [partial(JsonLinesSink, path, resume)]
    for name, build in FILE_SINKS.items():
        section = getattr(config, name)
        if section.enabled:
            # output_path/job_name, as DeepSpeed.
            default = run_folder / name.removesuffix("_monitor")
            folder = Path(section.output_path or default, section.job_name)
            builders.append(partial(_in_background, config, build, folder, resume, names))
    return builders


def _in_background(config: Any, build: Callable[..., Sink], *arguments: Any) -> Sink:
    """Return a sink that runs in a thread; a missing package raises here."""
    # The other ranks wait for this one at the end: it must close its sinks well within the timeout.
    seconds = min(CLOSE_SECONDS, config.mesh.timeout_seconds / 4)
    return BackgroundSink(build(*arguments), close_seconds=seconds)


def _wandb(
    config: Any,
    run_folder: Path,
    saved: Mapping[str, Any],
    logger: logging.Logger,
    facts: Mapping[str, Any],
) -> Sink:
    section = config.wandb
    options = WandbOptions(
        mode=section.mode,
        project=section.project,
        entity=section.team,
        group=section.group,
        name=section.name or run_folder.resolve().name,
        tags=tuple(section.tags or ()),
        # The run id of the checkpoint wins: the config may contain the id of an older run.
        id=saved.get("id") or section.id,
        resume=section.resume or "allow",
    )
    values = config.to_dict() | {"run": dict(facts)}
    sink = WandbSink(
        section.dir or run_folder,
        options,
        logger=logger,
        config=values,
        names=config.monitor.metric_names,
        started=saved.get("started"),
    )
    return _in_background(config, lambda: sink)
