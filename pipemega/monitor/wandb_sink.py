"""Weights & Biases: online with an API key and a server that answers, else offline."""

import logging
import os
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.monitor.records import (
    EventRecord,
    MetricNames,
    PictureRecord,
    Record,
    SampleRecord,
    StepRecord,
    TimelineRecord,
    in_names,
    metric_name,
    name_patterns,
)
from pipemega.monitor.sinks import Sink, State

# Events that wandb sends to the user, and their levels.
_ALERTS = {
    "nonfinite": ("inf or nan", "ERROR"),
    "rollback": ("rollback", "WARN"),
    "loss_spike": ("loss spike", "WARN"),
    "stop": ("run stopped", "INFO"),
}

# How long to wait for the server before the run is logged offline.
INIT_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class WandbOptions:
    """Arguments of `wandb.init`, by their names there.

    Args:
        mode: "online", "offline", "shared" or "disabled"; None: the setting of wandb
            (`wandb offline`, WANDB_MODE), else online. Online needs a key and a server that
            answers; without them the run is offline, with a warning in the log.
        entity: the team (DeepSpeed's `team`).
        id: id of the run to continue; None starts a new one.
        resume: "allow", "must", "never" or "auto".
    """

    mode: str | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    id: str | None = None
    resume: str = "allow"


class WandbSink(Sink):
    """Writes to one wandb run; a resumed training continues the run.

    Each point has `step`, `consumed_samples` and `consumed_tokens`; curves are drawn over samples,
    and any panel can be switched. wandb's own step is the number of milliseconds since the run
    started: wandb drops points whose step is not above those that it has already received. A run
    that resumes from an older checkpoint repeats steps, and the parts of an offline run each start
    at 0, so `wandb sync` would lose points of all but the first part.

    Events are sent as alerts, and generated texts are shown as a table.

    Args:
        folder: wandb creates its folder `wandb/` in it.
        options: arguments of `wandb.init`; None: the defaults.
        logger: logs a warning if the run is offline.
        config: the resolved configuration, uploaded with the run.
        names: how the metrics are named.
        started: `state_dict()["started"]` of a resumed run.
        module: replaces the wandb package in tests.

    Raises:
        ConfigError: wandb is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        folder: str | Path,
        options: WandbOptions | None = None,
        *,
        logger: logging.Logger,
        config: Mapping[str, Any] | None = None,
        names: MetricNames = "grouped",
        started: float | None = None,
        module: Any = None,
    ) -> None:
        self._wandb = _import_wandb() if module is None else module
        options = options or WandbOptions()
        if options.id is None and options.resume == "allow":
            # Known now, for a checkpoint that is written before the server has answered.
            options = replace(options, id=uuid.uuid4().hex[:8])
        self._id, self._mode, self._logger = options.id, options.mode, logger
        self._folder, self._names = Path(folder), names
        self._started, self._last_point = started or time.time(), -1
        self._texts: list[list[Any]] = []
        self._arguments = asdict(options) | {"dir": str(folder), "config": dict(config or {})}
        self._arguments |= {"tags": list(options.tags)}
        del self._arguments["mode"]

    def open(self) -> None:
        """Create the run on the server, or offline if the server does not answer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = _start(self._wandb, self._mode, self._arguments, self._logger)
        self._id = self._run.id
        for axis in ("step", "consumed_samples", "consumed_tokens"):
            self._run.define_metric(axis)
        for pattern in name_patterns(self._names):
            self._run.define_metric(pattern, step_metric="consumed_samples")

    def write(self, record: Record) -> None:
        point: dict[str, Any] = in_names(self._names, record.scalars())
        point |= {"step": record.step, "consumed_samples": record.consumed_samples}
        if isinstance(record, StepRecord) and record.consumed_tokens:
            point["consumed_tokens"] = record.consumed_tokens
        elif isinstance(record, TimelineRecord | PictureRecord) and record.picture is not None:
            name = metric_name(self._names, record.picture_name)
            point[name] = self._wandb.Image(str(record.picture))
        elif isinstance(record, SampleRecord):
            self._texts.append([record.step, record.prompt, record.text])
            columns = ["step", "prompt", "text"]
            point["eval/samples"] = self._wandb.Table(columns=columns, data=list(self._texts))
        milliseconds = int((time.time() - self._started) * 1e3)
        self._last_point = max(milliseconds, self._last_point + 1)
        self._run.log(point, step=self._last_point)
        if isinstance(record, EventRecord) and record.name in _ALERTS:
            title, level = _ALERTS[record.name]
            self._run.alert(title=title, text=record.text, level=level)

    def close(self) -> None:
        self._run.finish()

    def abandon(self) -> None:
        """Kill wandb's service process, for which the package waits at exit."""
        for process in _children("wandb-core"):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def state_dict(self) -> State:
        """Return the run's id, and when it started, in seconds since 1970."""
        return {} if self._id is None else {"id": self._id, "started": self._started}


def _start(wandb: Any, mode: str | None, arguments: dict[str, Any], logger: logging.Logger) -> Any:
    """Start and return the run; offline if online is allowed but fails."""
    mode = mode or wandb.setup().settings.mode
    if mode not in ("online", None):
        return _init(wandb, mode, arguments)
    try:
        if _has_key(wandb):
            return _init(wandb, "online", arguments)
        reason = "there is no API key (wandb login)"
    except wandb.Error as error:  # no network, invalid key, no access to the project
        reason = (str(error) or type(error).__name__).splitlines()[0]
    logger.warning(
        "wandb is offline; upload the run later with 'wandb sync' from %s: %s",
        arguments["dir"],
        reason,
    )
    return _init(wandb, "offline", arguments)


def _init(wandb: Any, mode: str, arguments: dict[str, Any]) -> Any:
    if mode == "offline":  # resuming needs a server; the id is kept
        arguments = arguments | {"resume": None}
    settings = wandb.Settings(init_timeout=INIT_TIMEOUT_SECONDS)
    return wandb.init(mode=mode, settings=settings, **arguments)


def _has_key(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # wandb releases without the parameter
        return bool(wandb.api.api_key)


def _children(name: str) -> list[int]:
    """Return the child processes that run program `name`; [] without /proc."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            program = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if int(parent) == os.getpid() and Path(program).name == name:
                children.append(int(folder.name))
    return children


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "wandb.enabled is true, but wandb is not installed: pip install wandb, or set "
            "wandb.enabled to false"
        ) from error
    return wandb
