"""The small training of the fault tests; a rank is started by a fork server or by torchrun.

Each rank writes an event log to the run's folder, one JSON object per line with one write call, so
that the log of a killed rank is complete.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import pipemega
from pipemega.engine.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.training import Trainer
from tests.faults import epoch_training
from tests.faults.fault_injection import (
    Fault,
    HookedCollate,
    HookedDataset,
    inject,
    inject_before_start,
    make_clock_jump,
)
from tests.ranks.training_runs import VOCAB, settings

STEPS, INTERVAL = 8, 2

# The quick tests use the first two.
MESHES: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": {"pipeline": 2}},
    "zero": {"mesh": {"data": 2}, "zero_optimization": {"stage": 1}},
    "data": {"mesh": {"data": 2}},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline x zero": {"mesh": {"pipeline": 2, "data": 2}, "zero_optimization": {"stage": 1}},
}
_MESHES = {"one": {"mesh": {"pipeline": 1}}, **MESHES}


@dataclass(frozen=True)
class Job:
    """A run.

    Args:
        folder: for the event logs, and for the checkpoints unless `saves` is set.
        mesh: a name in `MESHES`, or "one".
        changes: override the config.
        fault: injected in the first incarnation only.
        timeout: timeout of waits for other ranks after start-up; None: a minute.
        saves: folder of the checkpoints.
        jumping_clock: the time of day jumps by hours, in every incarnation.
        epochs: run `epoch_training` instead; "killed": with the kill.
    """

    folder: str
    mesh: str = "pipeline"
    changes: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    timeout: float | None = None
    saves: str | None = None
    jumping_clock: bool = False
    epochs: Literal["", "killed", "complete"] = ""

    @property
    def world_size(self) -> int:
        return math.prod(_MESHES[self.mesh]["mesh"].values())

    @property
    def may_lose(self) -> int:
        """Steps since the last save; with background saves, since the save before it."""
        saves = 2 if self.changes.get("checkpoint", {}).get("async") else 1
        return saves * INTERVAL

    @property
    def saved_in(self) -> Path:
        return Path(self.saves or f"{self.folder}/run")

    @property
    def config(self) -> dict[str, Any]:
        mesh = {**_MESHES[self.mesh]["mesh"], "device": "cpu", "timeout_seconds": 60}
        sections: dict[str, Any] = {
            **_MESHES[self.mesh],
            "train_batch_size": 8,
            "steps_per_print": 1000,
            "mesh": mesh,
            "training": {"train_steps": STEPS, "progress": False, "resume": "auto"},
            "checkpoint": {"save": str(self.saved_in), "interval": INTERVAL, "keep_last": 2},
        }
        for key, value in self.changes.items():
            old = sections.get(key)
            sections[key] = {**old, **value} if isinstance(old, dict) else value
        return settings(**sections)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "Job":
        values = json.loads(text)
        fault = values.pop("fault")
        return cls(**values, fault=None if fault is None else Fault(**fault))


class EventLog:
    """The event log of one rank."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **entry: Any) -> None:
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def log_events(engine: Engine, log: EventLog) -> None:
    """Write the steps and checkpoints of an engine to an event log."""
    log.write(started_at=engine.global_steps)
    add_record, save = engine.run.logger.add, engine.run.save_checkpoint

    def log_step(loss: float, *rest: Any) -> None:
        add_record(loss, *rest)
        log.write(step=engine.global_steps, loss=float(loss).hex())

    def log_save(*args: Any, **options: Any) -> Any:
        path = save(*args, **options)
        # With background saves only the previous one is known to be on the disk.
        behind = INTERVAL if engine.config.checkpoint.in_background else 0
        log.write(saved=max(0, engine.global_steps - behind))
        return path

    engine.run.logger.add = log_step  # type: ignore[method-assign]
    engine.run.save_checkpoint = log_save  # type: ignore[method-assign]


def main(job: Job) -> None:
    """Run one incarnation of one rank; exits like a script, with an exit code."""
    if job.epochs:
        epoch_training.main(job.folder, _MESHES[job.mesh], kill=job.epochs == "killed")
        return
    rank = int(os.environ["RANK"])
    fault = job.fault if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None
    if fault is not None and fault.rank not in (rank, None):
        fault = None
    log = EventLog(job.folder, rank)
    torch.set_num_threads(1)
    if job.jumping_clock:
        make_clock_jump(rank)
    if fault is not None:
        inject_before_start(fault, log)
    with pipemega.run():
        trainer = Trainer(build(job))
        log_events(trainer.engine, log)
        if fault is not None:
            inject(fault, trainer, log)
        if job.timeout is not None:
            _set_timeouts(job.timeout, trainer.engine)
        trainer.fit()
        if trainer.engine.global_steps == STEPS:
            log.write(digest=digest(trainer.engine))


def build(job: Job) -> Engine:
    loaded = pipemega.load_config(job.config)
    mesh = pipemega.build_mesh(loaded)
    engine, *_ = pipemega.initialize(
        gpt(GPTConfig.of(loaded, VOCAB)),
        loaded,
        HookedDataset(),
        collate_fn=HookedCollate(),
        mesh=mesh,
    )
    return engine


def digest(engine: Engine) -> str:
    """Return a hash of all parameters of the unsharded model, and of the counters."""
    hashed = hashlib.sha256(f"{engine.global_steps} {engine.consumed_samples}".encode())
    for name, parameter in sorted(engine.parameter_state().items()):
        hashed.update(name.encode())
        hashed.update(parameter.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _set_timeouts(seconds: float, engine: Engine) -> None:
    """Set the timeouts after start-up, which may take longer on a busy machine."""
    timeout = timedelta(seconds=seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    transport = engine.steps.executor._transport
    if transport is not None:
        transport._timeout = timeout
    # The timeout of the group for background saves.
    engine.run.checkpointer._background._timeout = timeout


if __name__ == "__main__":
    main(Job.of_json(Path(sys.argv[1]).read_text()))
