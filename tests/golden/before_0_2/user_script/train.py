"""A script of a user: a callback, a Trainer, and then a loop of its own."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import pipemega
from pipemega.training import Callback


class Samples(torch.utils.data.Dataset[Any]):
    fingerprint = "forty points"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


class BestLoss(Callback):
    """Keeps the lowest loss, also in checkpoints."""

    def __init__(self) -> None:
        self.best = float("inf")

    def after_step(self, trainer: Any, loss: float) -> None:
        self.best = min(self.best, loss)
        print(f"user: step {trainer.engine.global_steps} loss {loss:.6f} best {self.best:.6f}")

    def after_evaluation(self, trainer: Any, values: Any) -> None:
        print(f"user: evaluation loss {values['loss']:.6f}")
        trainer.log({"best": self.best})

    def before_save(self, trainer: Any) -> None:
        print(f"user: saves step {trainer.engine.global_steps}")

    def after_load(self, trainer: Any) -> None:
        print(f"user: loaded step {trainer.engine.global_steps} best {self.best:.6f}")

    def after_fit(self, trainer: Any) -> None:
        print(f"user: fit ends, stopped {trainer.stopped!r}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def model() -> pipemega.PipelineModule:
    layers = [
        pipemega.LayerSpec(nn.Linear, 4, 8),
        torch.tanh,
        pipemega.LayerSpec(nn.Linear, 8, 4),
    ]
    return pipemega.PipelineModule(layers, nn.functional.mse_loss)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    engine, *_ = pipemega.initialize(model(), sys.argv[1], Samples())
    pipemega.Trainer(engine, Samples(), callbacks=[BestLoss()]).fit()
    no_files = ["checkpoint.save=null", "checkpoint.interval=0", "csv_monitor.enabled=false"]
    loop, optimizer, *_ = pipemega.initialize(
        model(), sys.argv[1], overrides=[*no_files, "training.resume=false"]
    )
    batch = torch.utils.data.default_collate([Samples()[at] for at in range(8)])
    for _ in range(3):
        loss = loop.train_batch(batch=batch)
        report = loop.last_step
        assert report is not None
        assert optimizer is not None
        rate = optimizer.param_groups[0]["lr"]
        print(f"user: loop step {loop.global_steps} loss {loss:.6f} rate {rate:.6f}")
        print(f"user: norm {report.grad_norm:.6f} samples {loop.consumed_samples}")
    print(f"user: loop evaluation {loop.eval_batch(batch=batch):.6f}")
    loop.close()


if __name__ == "__main__":
    with pipemega.run():
        main()
