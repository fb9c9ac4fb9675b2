"""Small runs of a Trainer with injected faults; each function runs on every rank.

Each sample has a mark that the layers pass on: it selects the layer and the half of the step in
which inf or nan arises. So the faults of a step depend on its data only.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine.engine import Engine
from pipemega.errors import PipemegaError, StopTraining
from pipemega.training import Trainer

WIDTH, LAYERS, MICRO, GAS = 4, 6, 2, 4

# A mark is one of these plus the position of the layer that it acts on,
FORWARD, BACKWARD, WEIGHT = 100, 200, 300
# or one of these, which act on the data.
NAN_INPUT, FAR_LABEL = 1000, 2000


class Spoil(torch.autograd.Function):
    """The identity; its gradient has an inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        spoiled = gradients[0].clone()
        spoiled.view(-1)[0] = float("inf")
        return spoiled


class Marked(nn.Linear):
    """A linear layer that injects inf or nan if the mark selects it."""

    def __init__(self, position: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.position = position

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Any:
        x, mark = inputs
        marks = {int(m) for m in mark.view(-1)}
        weight: Tensor = self.weight
        if WEIGHT + self.position in marks:
            weight = Spoil.apply(weight)
        if BACKWARD + self.position in marks:
            x = Spoil.apply(x)
        y = torch.tanh(F.linear(x, weight, self.bias))
        if FORWARD + self.position in marks:
            y = y.clone()
            y[0, :3] = float("nan")
        return y if self.position == LAYERS - 1 else (y, mark)


class Samples(torch.utils.data.Dataset[Any]):
    """Random samples, the same in every process; some have a mark.

    Args:
        marks: index of a sample -> its mark.
    """

    already_shuffled = True

    def __init__(self, marks: Mapping[int, int] | None = None, size: int = 2000) -> None:
        self.marks, self.size = dict(marks or {}), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        mark = self.marks.get(index, 0)
        label = x.flip(0) + (1000.0 if mark == FAR_LABEL else 0.0)
        if mark == NAN_INPUT:
            x[2] = float("nan")
        return (x, torch.tensor([mark])), label


def sample(step: int, microbatch: int, data_rank: int = 0, data_size: int = 1) -> int:
    """Return the index of the first sample of a micro-batch; steps count from 1."""
    return ((step - 1) * GAS + microbatch) * MICRO * data_size + data_rank * MICRO


def model() -> PipelineModule:
    layers = [LayerSpec(Marked, position) for position in range(LAYERS)]
    return PipelineModule(layers, F.mse_loss)


def config(folder: str | None = None, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "training": {"train_steps": 8, "progress": False},
        "steps_per_print": None,
    }
    if folder is not None:
        settings["checkpoint"] = {"save": folder, "interval": 3}
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return settings


def build(settings: Mapping[str, Any], marks: Mapping[int, int] | None = None) -> Engine:
    engine, *_ = initialize(model(), settings, Samples(marks))
    return engine


def error_of_training(settings: Mapping[str, Any], marks: Mapping[int, int]) -> str:
    """Return the message of the error that a step raises."""
    engine = build(settings, marks)
    with pytest.raises(PipemegaError) as caught:
        train_three_steps(engine)
    return checked_message(caught.value)


def train_three_steps(engine: Engine) -> None:
    for _ in range(3):
        engine.train_batch()
    engine.settle()


def checked_message(error: PipemegaError) -> str:
    assert error.on_every_rank
    return f"{type(error).__name__}: {error}"


def errors_of_training(cases: list[tuple[Mapping[str, Any], Mapping[int, int]]]) -> Any:
    return [error_of_training(settings, marks) for settings, marks in cases]


def fit(settings: Mapping[str, Any], marks: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Run a Trainer to the end; return its results."""
    return finish(Trainer(build(settings, marks)))


class Stream(torch.utils.data.IterableDataset[Any]):
    """An iterable dataset; its samples can be read once."""

    def __init__(self, count: int) -> None:
        samples = Samples()
        self.rest = (samples[index] for index in range(count))

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        return next(self.rest)


def fit_until_the_data_ends(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    engine, *_ = initialize(model(), settings, Stream(steps * GAS * MICRO))
    return finish(Trainer(engine))


def finish(trainer: Trainer) -> dict[str, Any]:
    engine, error = trainer.engine, ""
    try:
        trainer.fit()
    except PipemegaError as failure:
        error = checked_message(failure)
    return results_of(engine, error, trainer.stopped)


def results_of(engine: Engine, error: str, stopped: str) -> dict[str, Any]:
    lines = []
    metrics = Path(engine.config.checkpoint.save or "nowhere") / "metrics.jsonl"
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "error": error,
        "stopped": stopped,
        "steps": engine.global_steps,
        "consumed": 0 if engine.loader is None else engine.loader.consumed_samples,
        "history": engine.run.logger.history.state_dict(),
        "skipped": engine.skipped_steps,
        "parameters": {n: p.double().numpy() for n, p in engine.parameter_state().items()},
        "losses": {line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
        "rows": [line for line in lines if line["kind"] == "train"],
        "events": [line for line in lines if line["kind"] == "event"],
    }


def fit_with_a_signal(
    settings: Mapping[str, Any], number: int, rank: int, step: int
) -> dict[str, Any]:
    """Run a Trainer; `rank` gets a signal in the middle of a step."""
    engine = build(settings)
    trainer = Trainer(engine)
    if engine.mesh.rank == rank:
        calls = iter(range(1, 1000))

        def send_signal(*_: Any) -> None:
            if next(calls) == (step - 1) * GAS + 2:
                os.kill(os.getpid(), number)

        next(iter(engine.module[0].layers.values())).register_forward_pre_hook(send_signal)
    with handlers_restored():
        return finish(trainer)


def loop(
    settings: Mapping[str, Any],
    marks: Mapping[int, int] | None = None,
    signal_at: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Run the user's own loop to the end; return its results.

    Args:
        signal_at: (rank, step): this rank gets SIGUSR1 before this step.
    """
    engine = build(settings, marks)
    steps, stopped = engine.config.training.train_steps or 0, ""
    with handlers_restored():
        try:
            while engine.global_steps < steps:
                if signal_at == (engine.mesh.rank, engine.global_steps + 1):
                    os.kill(os.getpid(), signal.SIGUSR1)
                engine.train_batch()
        except StopTraining as stop:
            stopped = stop.reason
        engine.close()
    return results_of(engine, "", stopped)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the signal handlers: the ranks of the pool are used again."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fit_with_a_slow_rank(settings: Mapping[str, Any], rank: int, seconds: float) -> dict[str, Any]:
    engine = build(settings)
    if engine.mesh.rank == rank:
        layer = next(iter(engine.module[0].layers.values()))
        layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return finish(Trainer(engine))


def flip_a_bit(settings: Mapping[str, Any], name: str, rank: int, kind: str) -> str:
    """Flip one bit of a parameter on one rank; return the error of the check."""
    if kind == "tied":
        layers = [
            TiedLayerSpec("matrix", nn.Linear, WIDTH, WIDTH),
            torch.tanh,
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            TiedLayerSpec("matrix", nn.Linear, WIDTH, WIDTH),
        ]
        engine, *_ = initialize(PipelineModule(layers, F.mse_loss), settings)
    else:
        engine = build(settings)
    engine.check_replicas()
    if dist.get_rank() == rank:
        bits = engine.steps.model.parameters[name].data.view(-1).view(torch.int32)
        bits[5] ^= 1 << 12
    with pytest.raises(PipemegaError) as caught:
        engine.check_replicas()
    return checked_message(caught.value)
