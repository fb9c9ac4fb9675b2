"""A run over epochs with metrics and callbacks; one rank kills itself within an epoch.

On any mesh it ends with the same evaluations, states of callbacks and learning rates.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

import pipemega
from pipemega.models import GPTConfig, gpt
from pipemega.monitor import EpochRecord
from pipemega.training import Accuracy, Callback, EarlyStopping, SaveBest, Trainer
from tests.ranks.checkpoint.checkpoint_runs import Sentences
from tests.ranks.training_runs import VOCAB, settings

# 40 samples in batches of 12: three whole steps and one of 4 samples per epoch.
EPOCHS, STEPS_PER_EPOCH, KILL_AT = 3, 4, 7


class History(Callback):
    """Keeps the learning rate of each step and the order of the points, in checkpoints too."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: list[int] = []

    def after_step(self, trainer: Trainer, loss: float) -> None:
        report = trainer.engine.last_step
        assert report is not None
        self.rates.append(report.learning_rate)

    def after_epoch(self, trainer: Trainer, epoch: EpochRecord) -> None:
        self.epochs.append(epoch.step)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.epochs = list(state["rates"]), list(state["epochs"])


class KillRank1(Callback):
    """Ends the process of rank 1 as kill -9 does."""

    def after_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.engine.global_steps == KILL_AT and trainer.engine.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def config_of(folder: str, mesh: dict[str, Any]) -> dict[str, Any]:
    config = settings(
        train_batch_size=12,
        **{**mesh, "mesh": {**mesh["mesh"], "device": "cpu", "timeout_seconds": 60}},
        scheduler={"type": "cosine", "by": "epoch"},
        training={"epochs": EPOCHS, "progress": False, "resume": "auto"},
        checkpoint={"save": folder, "interval": 3},
        steps_per_print=1000,
    )
    config["scheduler"]["params"] = {"warmup_steps": 1, "warmup_init_lr": 1e-3, "min_lr": 1e-4}
    return config


def main(folder: str, mesh: dict[str, Any], *, kill: bool) -> None:
    """Run one rank; rank 0 writes the results of a complete run to `folder`/results.json.

    Args:
        mesh: the section `mesh`, and others that belong to it.
        kill: rank 1 ends itself after step `KILL_AT`.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with pipemega.run():
        config = pipemega.load_config(config_of(f"{folder}/run", mesh))
        engine, *_ = pipemega.initialize(gpt(GPTConfig.of(config, VOCAB)), config, Sentences())
        history, best = History(), SaveBest("loss")
        callbacks = [history, best, EarlyStopping("loss", patience=2)]
        trainer = Trainer(
            engine,
            {"first": Sentences(), "again": Sentences()},
            metrics={"top1": Accuracy(), "top5": Accuracy(k=5)},
            callbacks=[*callbacks, KillRank1()] if kill else callbacks,
        )
        trainer.fit()
        results = {
            "evaluations": trainer.evaluations,
            "states": {type(c).__name__: c.state_dict() for c in callbacks},
            "rates": history.rates,
            "counters": (engine.epoch, engine.global_steps, engine.consumed_samples),
            "parameters": {n: p.flatten().tolist() for n, p in engine.parameter_state().items()},
        }
        if engine.mesh.rank == 0:
            Path(folder, "results.json").write_text(json.dumps(results))
