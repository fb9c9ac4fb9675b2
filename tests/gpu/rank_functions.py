"""Functions that the tests run on several ranks; arguments and results are JSON values."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from pipemega.training.generation import generate
from tests.ranks import small_models, training_runs
from tests.ranks.optimizer import post_validate_runs
from tests.ranks.training_runs import LENGTH, VOCAB, build, data, settings

NO_DROPOUT = {"hidden_dropout": 0.0}
# Longer than a step with the first use of kernels, shorter than the limit of a test.
TIMEOUT_SECONDS = 90


def config_of(device: str, mesh: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {**NO_DROPOUT, **changes.pop("model", {})}
    limits = {"device": device, "timeout_seconds": TIMEOUT_SECONDS}
    return settings(mesh={**mesh, **limits}, model=model, **changes)


def train_gpt(device: str, mesh: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return losses, norms and the evaluation of a small GPT in fp32."""
    result = training_runs.train(config_of(device, mesh, **changes), "float32")
    return {key: result[key] for key in ("loss", "norm", "eval")}


def train_gpt_twice(device: str, mesh: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Return the results of two runs with `training.deterministic_mode`."""
    changes |= {"training": {"deterministic_mode": True}}
    try:
        return [train_gpt(device, mesh, **changes) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


def train_tied(device: str, mesh: dict[str, Any]) -> dict[str, Any]:
    """Train a model whose first, middle and last layer share a matrix, in fp64."""
    result = small_models.train("tied_thrice", 3, mesh={**mesh, "device": device})
    parameters = {name: value.tolist() for name, value in result["parameters"].items()}
    return {"loss": result["loss"], "parameters": parameters}


def save_and_resume(
    device: str, mesh: dict[str, Any], folder: str, in_background: bool
) -> list[list[float]]:
    """Save after two steps, train two more while the files are written; resume and repeat them.

    Returns:
        the losses of the last two steps, of the first engine and of the resumed one.
    """
    config = config_of(device, mesh, checkpoint={"async": in_background})
    first = build(config)
    for step in range(2):
        first.train_batch(data(first, step))
    first.save_checkpoint(Path(folder))
    losses = [first.train_batch(data(first, step)) for step in (2, 3)]
    first.finish_saving()
    second = build(config)
    second.load_checkpoint(Path(folder))
    return [losses, [second.train_batch(data(second, step)) for step in (2, 3)]]


def validate_afterwards(device: str, mesh: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Train with and without post-validation, with one step that has to be undone."""
    config = config_of(device, mesh, pipeline={"schedule": schedule}, gradient_clipping=1.0)
    fenced, validated = post_validate_runs.train_both(
        config, {"optimizer_sync_after": 0}, pushes={2: 1000.0}
    )
    differences = [
        float(numpy.abs(value - validated["state"][name]).max())
        for name, value in fenced["state"].items()
        if isinstance(value, numpy.ndarray) and value.size
    ]
    return {
        "fenced": [float(loss) for loss in fenced["loss"]],
        "validated": [float(loss) for loss in validated["loss"]],
        "waited": validated["waited"],
        "rollbacks": validated["rollbacks"],
        "difference": max(differences),
    }


def evaluate_and_generate(device: str, mesh: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Evaluate between two steps and generate tokens after each."""
    engine = build(config_of(device, mesh, **changes))
    result: dict[str, Any] = {"loss": [], "eval": [], "tokens": []}
    for step in range(2):
        result["loss"].append(engine.train_batch(data(engine, step)))
        result["eval"].append(engine.eval_batch(data(engine, 50 + step)))
        result["tokens"].append(generate(engine, [1, 2, 3], 6, seq_length=LENGTH, vocab_size=VOCAB))
    return result


def train_until_fault(
    device: str, mesh: dict[str, Any], victim: int, fault: str, folder: str, timeout_seconds: float
) -> None:
    """Train without end; before step 4 rank `victim` is killed, or hangs, or raises.

    The victim writes the time of the fault to the file `fault`.
    """
    config = config_of(device, mesh)
    config["mesh"]["timeout_seconds"] = timeout_seconds
    engine = build(config)
    for step in range(100_000):
        if step == 3 and engine.mesh.rank == victim:
            Path(folder, "fault").write_text(str(time.time()), encoding="utf-8")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise ValueError("injected error")
            time.sleep(10_000)
        engine.train_batch(data(engine, step))
