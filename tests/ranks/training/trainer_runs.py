"""Small runs of a Trainer with epochs, metrics and callbacks; each function runs on every rank."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import TENSOR_AXIS, LayerSpec, PipelineModule, Trainer, initialize
from pipemega.config import load
from pipemega.errors import CheckpointError, ConfigError, PipemegaError
from pipemega.models import GPTConfig, gpt
from pipemega.tensor_parallel import ColumnParallelLinear
from pipemega.training import Accuracy, Callback, EarlyStopping, Metric, Perplexity, SaveBest
from tests.ranks.training_runs import VOCAB, microbatch

FEATURES, CLASSES = 6, 5


class Points(torch.utils.data.Dataset[Any]):
    """Points in float64, with a class that a linear model can learn in part."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = self.points[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def classifier() -> PipelineModule:
    kind = {"dtype": torch.float64}
    layers = [
        LayerSpec(nn.Linear, FEATURES, 8, **kind),
        torch.tanh,
        LayerSpec(nn.Linear, 8, 8, **kind),
        torch.tanh,
        LayerSpec(nn.Linear, 8, CLASSES, **kind),
    ]
    return PipelineModule(layers, F.cross_entropy)


def config(folder: Path | str | None = None, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "training": {"progress": False},
        "steps_per_print": None,
        "mesh": {"device": "cpu"},
    }
    if folder is not None:
        settings["checkpoint"] = {"save": str(folder)}
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return settings


TRAIN, EASY, HARD = Points(30, seed=1), Points(19, seed=2), Points(13, seed=3)
METRICS = {"top1": Accuracy(), "top2": Accuracy(k=2)}


class Recorder(Callback):
    """Records the points with the step; its state is the number of steps."""

    def __init__(self, name: str = "") -> None:
        self.name, self.points, self.steps = name, list[Any](), 0

    def _add(self, point: str, trainer: Trainer, *what: Any) -> None:
        self.points.append((point, trainer.engine.global_steps, *what))

    def before_fit(self, trainer: Trainer) -> None:
        self._add("before_fit", trainer)

    def after_step(self, trainer: Trainer, loss: float) -> None:
        self.steps += 1
        self._add("after_step", trainer)

    def after_epoch(self, trainer: Trainer, epoch: Any) -> None:
        self._add("after_epoch", trainer, epoch.epoch)

    def after_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._add("after_evaluation", trainer)

    def before_save(self, trainer: Trainer) -> None:
        self._add("before_save", trainer)

    def after_load(self, trainer: Trainer) -> None:
        self._add("after_load", trainer)

    def on_exception(self, trainer: Trainer, error: Exception) -> None:
        self._add("on_exception", trainer, str(error))

    def after_fit(self, trainer: Trainer) -> None:
        self._add("after_fit", trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def rows(folder: Path | str, kind: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def fit(
    settings: Mapping[str, Any],
    callbacks: Sequence[Callback] = (),
    *,
    epochs: int | None = None,
    **arguments: Any,
) -> Trainer:
    """Fit the classifier on two validation sets."""
    engine, *_ = initialize(classifier(), settings, TRAIN)
    sets = {"easy": EASY, "hard": HARD}
    options = {"valid": sets, "metrics": METRICS, "callbacks": callbacks, "epochs": epochs}
    trainer = Trainer(engine, **(options | arguments))
    trainer.fit()
    return trainer


def results(
    settings: Mapping[str, Any], epochs: int = 3, *, stop_at: int | None = None
) -> dict[str, Any]:
    """Fit with SaveBest and EarlyStopping; return what all ranks know."""

    class Stop(Callback):
        def after_step(self, trainer: Trainer, loss: float) -> None:
            # One rank is enough; the step after it is the last one.
            if trainer.engine.global_steps == stop_at and trainer.engine.mesh.rank == 0:
                trainer.stop("enough steps")

    counter = Recorder("counter")
    early = EarlyStopping("hard/loss", patience=50)
    best = SaveBest("top1")
    trainer = fit(settings, [counter, early, Stop(), best], epochs=epochs)
    return {
        "evaluations": trainer.evaluations,
        "steps": (trainer.engine.global_steps, trainer.engine.epoch, counter.steps),
        "best": (best.best, early.best, early.waited),
        "stopped": trainer.stopped,
        "parameters": {n: p.numpy() for n, p in trainer.engine.parameter_state().items()},
    }


def results_until(settings: Mapping[str, Any], stop_at: int) -> dict[str, Any]:
    return results(settings, stop_at=stop_at)


def failing(settings: Mapping[str, Any], rank: int, point: str) -> str:
    """Fit with a callback that raises on one rank; return the error of this rank."""

    def fails(self: Callback, trainer: Trainer, *_: Any) -> None:
        if trainer.engine.mesh.rank == rank:
            raise ValueError("out of ideas")

    callback = type("Broken", (Callback,), {point: fails})()
    try:
        fit(settings, [callback], epochs=1)
    except PipemegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gpt_metrics(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a GPT, whose vocabulary may be sharded, on data with ignored labels."""
    config = GPTConfig.of(load(settings), VOCAB)
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        try:
            engine, *_ = initialize(gpt(config), settings)
        finally:
            torch.set_default_dtype(torch.float32)
    samples = [microbatch(0, place) for place in range(5)]
    data = [(x, y) for xs, ys in samples for x, y in zip(xs, ys, strict=True)]
    metrics = {f"top{k}": Accuracy(k) for k in (1, 10, 30)}
    metrics |= {"perplexity": Perplexity(), "gathered": LastLogit()}
    trainer = Trainer(engine, data, metrics=metrics)
    trainer.evaluate()
    trainer.evaluate()  # metrics begin at zero again
    return trainer.evaluations[-1].values


class LastLogit(Metric):
    """The mean logit of the last word: its outputs must be whole, without padding."""

    def sums(self, outputs: Any, labels: Any) -> Any:
        assert outputs.shape[-1] == VOCAB
        return outputs[..., -1].sum(), labels.numel()


def torchmetrics_values(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of torchmetrics that the data ranks compute from different samples."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    metrics = {
        "top1": MulticlassAccuracy(CLASSES, average="micro"),
        "both": MetricCollection({"auroc": MulticlassAUROC(CLASSES)}),
        "own": Accuracy(),
    }
    return fit(settings, valid=TRAIN, metrics=metrics, epochs=1).evaluations[-1].values


class KeepsOutputs(torch.nn.Module):
    """As a metric of torchmetrics whose state is a list."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: dict[str, Any] = {"outputs": []}

    def update(self, outputs: Any, labels: Any) -> None:
        pass

    def compute(self) -> float:
        raise AssertionError("some data ranks have no list to gather")

    def reset(self) -> None:
        pass


def list_metric_of_few_samples(settings: Mapping[str, Any]) -> str:
    """Evaluate a metric with lists on fewer samples than data ranks; return this rank's error."""
    try:
        fit(settings, valid=Points(1, seed=4), metrics={"curve": KeepsOutputs()}, epochs=1)
    except PipemegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class FailsOnOneRank(Metric):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sums(self, outputs: Any, labels: Any) -> Any:
        if torch.distributed.get_rank() == self.rank:
            raise ValueError("cannot add this up")
        return 1.0, 1.0


def failing_metric(settings: Mapping[str, Any], rank: int) -> str:
    """Fit with a metric that fails on one rank; return the error of this rank."""
    try:
        fit(settings, metrics={"mine": FailsOnOneRank(rank)}, epochs=1)
    except PipemegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing_load(settings: Mapping[str, Any], rank: int) -> str:
    """Resume with a callback that cannot load its state on one rank; return this rank's error."""

    class Kept(Recorder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if torch.distributed.get_rank() == rank:
                raise ValueError("out of ideas")

    fit(settings, [Kept("kept")], epochs=1)
    try:
        fit(settings, [Kept("kept")], epochs=2)
    except PipemegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def metrics_of_blocks(settings: Mapping[str, Any]) -> str:
    """Build a Trainer with metrics over a last layer of two blocks; return the error."""
    layers = [LayerSpec(ColumnParallelLinear, FEATURES, [4, 2], axis=TENSOR_AXIS)]
    engine, *_ = initialize(PipelineModule(layers, F.cross_entropy), settings, TRAIN)
    with pytest.raises(PipemegaError) as caught:
        Trainer(engine, EASY, metrics=METRICS)
    return str(caught.value)


class OfRank(Metric):
    """A metric with another value on each rank, as rounding of a device may give."""

    def sums(self, outputs: Any, labels: Any) -> Any:
        return float(torch.distributed.get_rank()), 1.0


def metric_of_ranks(settings: Mapping[str, Any]) -> list[Any]:
    return fit(settings, epochs=1, metrics={"mine": OfRank()}).evaluations


def failing_after_fit(settings: Mapping[str, Any], point: str) -> str:
    """Save or evaluate after `fit`, with a callback that raises on rank 1; return the error."""

    def fails(self: Any, trainer: Trainer, *_: Any) -> None:
        if self.armed and trainer.engine.mesh.rank == 1:
            raise ValueError("out of ideas")

    callback = type("Broken", (Callback,), {point: fails, "armed": False})()
    trainer = fit(settings, [callback], epochs=1)
    callback.armed = True
    try:
        trainer.evaluate() if point == "after_evaluation" else trainer.save("again")
        trainer.engine.eval_batch(batch=(EASY.points[:2], EASY.labels[:2]))
    except PipemegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def different_parts(settings: Mapping[str, Any], what: str) -> str:
    """Build a Trainer with other parts on rank 0; return the error of this rank."""
    is_first = torch.distributed.get_rank() == 0
    parts: dict[str, Any] = {
        "callbacks": {"callbacks": [Recorder("mine")] if is_first else []},
        "metrics": {"metrics": METRICS if is_first else {}},
        "sets": {"valid": {"easy": EASY} if is_first else {"hard": HARD}},
    }
    with pytest.raises(ConfigError) as caught:
        fit(settings, **{"epochs": 1, **parts[what]})
    assert caught.value.on_every_rank
    return str(caught.value)


def without_callback(settings: Mapping[str, Any]) -> str:
    """Resume without a callback whose state was saved; return the error of this rank."""
    fit(settings, [Recorder("mine")], epochs=1)
    with pytest.raises(CheckpointError) as caught:
        fit(settings, epochs=2)
    assert caught.value.on_every_rank
    return str(caught.value)
