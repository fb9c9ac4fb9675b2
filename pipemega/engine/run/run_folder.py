"""The folder of a run: chosen, locked and recorded on rank 0.

checkpoint.save             the run folder too; for a URL it is runs/<last part of the URL>
training.run_name           without checkpoint.save: runs/<name>
neither                     runs/<name of the config file>-<time>

runs/mine-20261122-040150/
  run.json          who started the run and when, so that a restart finds its folder again
  config.json       the resolved config
  metrics.jsonl     and what other sinks write
  run.lock          while the run writes: see `pipemega.storage.locks`
runs/latest         a symbolic link to the newest folder that this module named

Facts about a run that its config does not have, for the record of the run.
"""

import itertools
import json
import logging
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from pipemega.checkpoint.checkpointer import run_lock_options
from pipemega.config import Batch, Config
from pipemega.distributed.mesh import Mesh, from_first
from pipemega.errors import CheckpointError, ConfigError
from pipemega.lazy_imports import __version__
from pipemega.storage.filesystem import LocalStorage, Storage, is_remote, storage_at
from pipemega.storage.locks import ProcessIdentity, folder_locks

RUNS = Path("runs")
"""Parent of the folders that are not configured, in the working directory of rank 0."""
RECORD = "run.json"
LATEST = "latest"


class RunFolder:
    """Opens the folder of a run, once.

    Args:
        log: the logger of this rank.
    """

    def __init__(self, config: Config, mesh: Mesh, log: logging.Logger) -> None:
        self._config, self._mesh, self._log = config, mesh, log
        self._path: Path | None = None
        self._is_open = False

    def open(self) -> Path:
        """Choose the folder, create and lock it, and log its path; collective.

        Raises:
            FolderLockedError: another run uses this folder or the folder of the checkpoints.
            ConfigError: an earlier run has used this training.run_name.
            CheckpointError: the folder cannot be written.
        """
        return from_first(self._mesh.world, self.on_rank0)

    def on_rank0(self) -> Path:
        """Do the same, only on rank 0; not collective."""
        try:
            self._path = self._path or _named_by(self._config) or _unnamed(self._config)
            if not self._is_open:
                self._begin(self._path)
        except OSError as error:
            raise CheckpointError(
                f"the run folder {error.filename or self._path} cannot be written: "
                f"{error.strerror or error}"
            ) from error
        self._is_open = True
        return self._path

    def close(self) -> None:
        """Release the locks, so that another run may use the folder. Not collective."""
        if self._is_open and self._path is not None:
            for storage in _storages(self._config, self._path):
                folder_locks.release(storage)
        self._is_open = False

    def _begin(self, folder: Path) -> None:
        config = self._config
        for storage in _storages(config, folder):
            folder_locks.lock(storage, run_lock_options(config, self._mesh))
        link = ""
        if config.checkpoint.save is None:
            _write_record(folder)
            if _set_latest(folder, self._log):
                link = f" (also {folder.parent / LATEST})"
        # To repeat the run with it.
        _write(folder / "config.json", config.to_json() + "\n")
        self._log.info(f"run folder: {folder}{link}")


def _named_by(config: Config) -> Path | None:
    save = config.checkpoint.save
    if save is None:
        return None
    # Files that are appended to line by line cannot be in an object store.
    return RUNS / Path(save).name if is_remote(save) else Path(save)


def _storages(config: Config, folder: Path) -> list[Storage]:
    save = config.checkpoint.save
    local: list[Storage] = [LocalStorage(folder)]
    return [storage_at(save), *local] if save is not None and is_remote(save) else local


# Folders that the config does not name


def _unnamed(config: Config) -> Path:
    """Return the folder of the run that is restarted, else a new one.

    Raises:
        ConfigError: an earlier run has used this training.run_name.
    """
    name = config.training.run_name
    own = next((folder for folder in _folders(name or config.name) if _is_restart_of(folder)), None)
    if own is not None:
        return own
    if name is None:
        return _new_folder(f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}")
    folder = RUNS / name
    if _record(folder) and not config.checkpoint.overwrite:
        raise ConfigError(
            f"training.run_name {name!r} is that of an earlier run (started "
            f"{_record(folder).get('started')}), whose records are in {folder}: choose another "
            f"name, or set checkpoint.overwrite to true to replace them"
        )
    return folder


def _folders(name: str) -> Iterator[Path]:
    """Yield the run folders whose names start with `name`, newest first."""
    if not RUNS.is_dir():
        return
    found = [f for f in RUNS.iterdir() if f.name.startswith(name) and not f.is_symlink()]
    yield from sorted(found, key=lambda folder: str(_record(folder).get("started")), reverse=True)


def _new_folder(name: str) -> Path:
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def _is_restart_of(folder: Path) -> bool:
    """Return whether torchrun or Slurm restarted this process after the run of a folder."""
    counts = (os.environ.get(n, "0") for n in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    launched = _record(folder).get("launched_by", [])
    return any(count != "0" for count in counts) and not set(_launchers()).isdisjoint(launched)


def _launchers() -> list[str]:
    """Return names of what started this process; a restarted process has one of them again."""
    names = []
    process, environ = ProcessIdentity.current(), os.environ
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        agent = ProcessIdentity.parent()
        names.append(f"torchrun {agent.boot} {agent.pid} {agent.start_ticks}")
        # torchrun's default, without --rdzv-id.
        if run_id != "none":
            names.append(f"torchrun --rdzv-id {run_id}")
    if process.job:
        names.append(f"slurm {process.job}")
    return names


def _record(folder: Path) -> Mapping[str, Any]:
    """Return the content of run.json; {} if there is none."""
    try:
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_record(folder: Path) -> None:
    old = _record(folder)
    values = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "process": ProcessIdentity.current().describe(),
        "launched_by": _launchers(),
    }
    if _is_restart_of(folder):
        values["started"] = old["started"]
    _write(folder / RECORD, json.dumps(values, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a whole file: a reader never sees a part of it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _set_latest(folder: Path, log: logging.Logger) -> bool:
    """Make `latest` beside the folder a link to it; return whether that succeeded."""
    link = folder.parent / LATEST
    temporary = link.with_name(f".{LATEST}.{uuid.uuid4().hex[:8]}.tmp")
    if link.exists() and not link.is_symlink():
        # Not ours: a folder, or the file `latest` of checkpoints in runs/.
        log.info(f"{link} is not a link, and stays as it is; move it away to get a link")
        return False
    try:
        temporary.symlink_to(folder.name, target_is_directory=True)
        temporary.replace(link)
    except OSError as error:
        log.debug(f"no link {link}: {error}")
        with suppress(OSError):
            temporary.unlink()
        return False
    return True


_GIT_SECONDS = 5.0


def run_facts(mesh: Mesh, batch: Batch, num_parameters: int, schedule: str) -> dict[str, Any]:
    """Return world size, mesh, batch sizes, number of parameters, versions and git commit."""
    return {
        "world_size": mesh.world.size,
        "mesh": {axis: getattr(mesh, axis).size for axis in ("pipeline", "data", "tensor")},
        "batch": {
            "train_batch_size": batch.train_batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "num_microbatches": batch.num_microbatches,
        },
        "num_parameters": num_parameters,
        "schedule": schedule,
        "device": _device_name(mesh.device),
        "git_commit": git_commit(),
        "pipemega": __version__,
        "torch": torch.__version__,
    }


def git_commit() -> str | None:
    """Return the commit of the current folder, with "-dirty" if files have changed; or None."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match="]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
