"""The small training that everything happens to; a rank of it, by a fork server or by torchrun.

Each rank keeps a book in the run's folder, one JSON object a line, each written whole: what a rank
that is killed had come to stands there.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipemega
from pipemega.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.training import Trainer
from tests.faults.plant import (
    Fault,
    Readable,
    Stacked,
    let_the_clock_jump,
    plant,
    plant_before,
)
from tests.ranks.training_run import VOCAB, settings

STEPS, INTERVAL = 8, 2

# The first two are those of the quick tests.
MESHES: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": {"pipeline": 2}},
    "zero": {"mesh": {"data": 2}, "zero_optimization": {"stage": 1}},
    "data": {"mesh": {"data": 2}},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline x zero": {"mesh": {"pipeline": 2, "data": 2}, "zero_optimization": {"stage": 1}},
}


@dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        folder: for the books, and for the checkpoints unless `saves` names another.
        mesh: a name in `MESHES`.
        changes: laid over the config.
        fault: what happens, in the first life of the run only.
        deadline: how long a rank waits for another once all have started; None: a minute.
        saves: where checkpoints go.
        jumping_clock: the time of day jumps by hours, in every life.
    """

    folder: str
    mesh: str = "pipeline"
    changes: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    deadline: float | None = None
    saves: str | None = None
    jumping_clock: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(MESHES[self.mesh]["mesh"].values())

    @property
    def may_lose(self) -> int:
        """Steps: since the last save; in the background, since the one before it."""
        saves = 2 if self.changes.get("checkpoint", {}).get("async") else 1
        return saves * INTERVAL

    @property
    def saved_in(self) -> Path:
        return Path(self.saves or f"{self.folder}/run")

    @property
    def config(self) -> dict[str, Any]:
        mesh = {**MESHES[self.mesh]["mesh"], "device": "cpu", "timeout_seconds": 60}
        sections: dict[str, Any] = {
            **MESHES[self.mesh],
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


class Book:
    """What one rank writes down."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = os.open(f"{folder}/book{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **entry: Any) -> None:
        os.write(self._file, (json.dumps(entry) + "\n").encode())


class Watched(Trainer):
    """A trainer that keeps a book."""

    def __init__(self, engine: Engine, book: Book) -> None:
        super().__init__(engine)
        self._book = book
        book.write(began=engine.global_steps)

    def train_step(self) -> float:
        loss = super().train_step()
        self._book.write(step=self.engine.global_steps, loss=float(loss).hex())
        return loss

    def save(self) -> None:
        super().save()
        # In the background only the one before is known to be on the disk.
        step = self.engine.global_steps
        behind = INTERVAL if self.config.checkpoint.in_background else 0
        self._book.write(saved=max(0, step - behind))


def main(job: Job) -> None:
    """One life of one rank; ends as a script does, with an exit code."""
    rank = int(os.environ["RANK"])
    fault = job.fault if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None
    if fault is not None and fault.rank not in (rank, None):
        fault = None
    book = Book(job.folder, rank)
    torch.set_num_threads(1)
    if job.jumping_clock:
        let_the_clock_jump(rank)
    if fault is not None:
        plant_before(fault, book)
    with pipemega.run():
        trainer = Watched(build(job), book)
        if fault is not None:
            plant(fault, trainer, book)
        if job.deadline is not None:
            _give_up_after(job.deadline, trainer.engine)
        trainer.fit()
        if trainer.engine.global_steps == STEPS:
            book.write(digest=digest(trainer.engine))


def build(job: Job) -> Engine:
    loaded = pipemega.load_config(job.config)
    mesh = pipemega.build_mesh(loaded)
    engine, *_ = pipemega.initialize(
        gpt(GPTConfig.of(loaded, VOCAB)), loaded, Readable(), collate_fn=Stacked(), mesh=mesh
    )
    return engine


def digest(engine: Engine) -> str:
    """Of all parameters of the unsplit model, and the counters."""
    hashed = hashlib.sha256(f"{engine.global_steps} {engine.consumed_samples}".encode())
    for name, parameter in sorted(engine.parameter_state().items()):
        hashed.update(name.encode())
        hashed.update(parameter.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _give_up_after(seconds: float, engine: Engine) -> None:
    """After the start, which on a busy machine may take longer than a wait in the run."""
    deadline = timedelta(seconds=seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(deadline, group)
    transport = engine._executor._transport
    if transport is not None:
        transport._timeout = deadline
    # Of the group that it makes for the first save in the background.
    engine._checkpoints._background._timeout = deadline


if __name__ == "__main__":
    main(Job.of_json(Path(sys.argv[1]).read_text()))
