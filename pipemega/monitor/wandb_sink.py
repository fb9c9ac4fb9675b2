"""Weights & Biases: online where there is a key and a network, else offline, to be synced later."""

import logging
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.monitor.records import PREFIX, Record, TimelineRecord
from pipemega.monitor.sinks import Sink, State

# How long a start may wait for the server before the run goes on offline.
INIT_TIMEOUT_SECONDS = 30.0


class WandbSink(Sink):
    """One wandb run, that a resumed training goes on with.

    Each point carries `step` and `samples`; the curves are drawn over samples, and any panel can
    be switched to step.  No step number is handed to wandb itself: it silently drops points of a
    step that it has seen, and a run that resumes from an older checkpoint has such steps.

    Args:
        folder: wandb makes its own folder `wandb/` in there.
        config: the resolved configuration, uploaded with the run.
        mode: "online", "offline", "shared" or "disabled"; None: what wandb is set up for
            (`wandb offline`, WANDB_MODE), else online.  Online needs a key and a server that
            answers; without them the run is offline, and the log says so.
        entity: the team (DeepSpeed's `team`).
        run_id: of the run to go on with; None starts a new one.
        resume: wandb's own word: "allow", "must", "never" or "auto".
        logger: is told when the run goes offline.
        module: stands in for the wandb package in tests.

    Raises:
        ConfigError: wandb is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        folder: str | Path,
        *,
        logger: logging.Logger,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        run_name: str | None = None,
        tags: Sequence[str] = (),
        run_id: str | None = None,
        resume: str | None = "allow",
        module: Any = None,
    ) -> None:
        self._wandb = _wandb() if module is None else module
        if run_id is None and resume == "allow":
            # Known at once, for a checkpoint that is written before the server has answered.
            run_id = uuid.uuid4().hex[:8]
        self._id, self._mode, self._logger = run_id, mode, logger
        self._folder = Path(folder)
        self._arguments = {
            "dir": str(folder),
            "config": dict(config or {}),
            "project": project,
            "entity": entity,
            "group": group,
            "name": run_name,
            "tags": list(tags),
            "id": run_id,
            "resume": resume,
        }

    def open(self) -> None:
        """Asks the server, and goes on offline if it does not answer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = _start(self._wandb, self._mode, self._arguments, self._logger)
        self._id = self._run.id
        self._run.define_metric("step")
        self._run.define_metric("samples")
        self._run.define_metric(PREFIX + "*", step_metric="samples")

    def write(self, record: Record) -> None:
        axes = {"step": record.step, "samples": record.consumed_samples}
        pictures = {}
        if isinstance(record, TimelineRecord) and record.picture is not None:
            pictures[record.picture_tag] = self._wandb.Image(str(record.picture))
        self._run.log(record.scalars() | axes | pictures)

    def close(self) -> None:
        self._run.finish()

    def abandon(self) -> None:
        """Kills wandb's own process, for which the package waits when the program ends."""
        for process in _children("wandb-core"):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def state_dict(self) -> State:
        """The run's id: the next sink takes it as `run_id`."""
        return {} if self._id is None else {"id": self._id}


def _start(wandb: Any, mode: str | None, arguments: dict[str, Any], logger: logging.Logger) -> Any:
    """The run, online if it can be and was not forbidden."""
    asked = mode or wandb.setup().settings.mode
    if asked not in ("online", None):
        return _init(wandb, asked, arguments)
    try:
        if _has_key(wandb):
            return _init(wandb, "online", arguments)
        reason = "there is no API key (wandb login)"
    except wandb.Error as error:  # no network, a key that is refused, no right to the project
        reason = (str(error) or type(error).__name__).splitlines()[0]
    logger.warning(
        "wandb goes on offline, to be uploaded with 'wandb sync' from %s: %s",
        arguments["dir"],
        reason,
    )
    return _init(wandb, "offline", arguments)


def _init(wandb: Any, mode: str, arguments: dict[str, Any]) -> Any:
    if mode == "offline":  # nothing to resume from where no server is asked; the id is kept
        arguments = arguments | {"resume": None}
    settings = wandb.Settings(init_timeout=INIT_TIMEOUT_SECONDS)
    return wandb.init(mode=mode, settings=settings, **arguments)


def _has_key(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # releases that cannot be told not to ask
        return bool(wandb.api.api_key)


def _children(name: str) -> list[int]:
    """The child processes that run a program of that name; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            program = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if int(parent) == os.getpid() and Path(program).name == name:
                found.append(int(folder.name))
    return found


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "wandb.enabled is true, but wandb is not installed: pip install wandb, or set "
            "wandb.enabled to false"
        ) from error
    return wandb
