"""Runs with a cut vocabulary, on one rank of several."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.errors import NonFiniteError, PipemegaError
from pipemega.models import GPTConfig, gpt
from pipemega.training.validation import output_shard
from tests.ranks import training_runs


def move_checkpoint(first: dict[str, Any], second: dict[str, Any], folder: str) -> list[Any]:
    """Train with one config, save, load with the other; return both losses of the next step."""
    torch.set_default_dtype(torch.float64)
    try:
        engine = training_runs.build(first)
        engine.train_batch(training_runs.data(engine, 0))
        engine.save_checkpoint(Path(folder))
        other = training_runs.build(second)
        other.load_checkpoint(Path(folder))
        one, two = engine.parameter_state(), other.parameter_state()
        equal = one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        outputs = [outputs_of(each) for each in (engine, other)]
        differences = [(a - b).abs().max().item() for a, b in zip(*outputs, strict=True)]
        losses = [each.train_batch(training_runs.data(each, 1)) for each in (engine, other)]
        losses += [each.eval_batch(training_runs.data(each, 2)) for each in (engine, other)]
        return [equal, differences, *losses]
    finally:
        torch.set_default_dtype(torch.float32)


def outputs_of(engine: Engine) -> list[Tensor]:
    """Return the logits of each way to get them, on ranks of the last stage."""
    found: list[Tensor] = []
    is_last = engine.mesh.pipeline.rank == engine.plan.rank_of_stage[-1]

    def keep(outputs: Tensor, _: Tensor) -> None:
        found.append(outputs)

    _, kept = engine.eval_batch(training_runs.data(engine, 2), return_outputs=True)
    engine.eval_batch(training_runs.data(engine, 3), on_output=keep if is_last else None)
    inputs = [inputs for inputs, _ in training_runs.data(engine, 4)]
    inferred = engine.infer(inputs)
    shard = output_shard(engine)
    if shard is None:
        assert kept is None
        assert inferred is None
        return []
    assert kept is not None
    assert inferred is not None
    assert len(kept) == len(found) == len(inferred) == len(inputs)
    return [shard.gather(logits) for logits in (*kept, *found, *inferred)]


def origins_of_nan(config: dict[str, Any]) -> list[str]:
    """Return the errors of steps with a nan in the rows of embedding or head on rank 1."""
    errors = []
    for layer in ("embedding", "head"):
        engine = training_runs.build(config)
        assert engine.steps.model.vocabulary is not None
        if engine.mesh.rank == 1:
            with torch.no_grad():
                getattr(engine.steps.model.vocabulary, layer).weight[0, 0] = torch.nan
        with pytest.raises(NonFiniteError) as error:
            engine.train_batch(training_runs.data(engine, 0))
        errors.append(str(error.value))
    return errors


def error_of_short_labels(config: dict[str, Any]) -> str:
    """Return the error of a step whose labels have one token less."""
    engine = training_runs.build(config)
    batches = [(tokens, labels[:, 1:]) for tokens, labels in training_runs.data(engine, 0)]
    try:
        engine.train_batch(iter(batches))
    except PipemegaError as error:
        return str(error)
    return ""


def train_ignoring(config: dict[str, Any], ignored: str) -> dict[str, Any]:
    """Train while no label counts in some micro-batches, in one step, or on one of two ranks."""
    microbatch = training_runs.microbatch

    def ignoring(step: int, place: int) -> tuple[Tensor, Tensor]:
        tokens, labels = microbatch(step, place)
        is_ignored = {
            "micro-batches": place % 3 == 1,
            "step": step == 1,
            "data rank": place % 2 == 1,
        }
        return tokens, torch.full_like(labels, -100) if is_ignored[ignored] else labels

    with mock.patch.object(training_runs, "microbatch", ignoring):
        return training_runs.train(config)


def refused_model(config: dict[str, Any]) -> str:
    """Return the error of a model that does not say how its vocabulary is cut."""
    net = PipelineModule([LayerSpec(torch.nn.Linear, 4, 4)] * 4, torch.nn.functional.mse_loss)
    try:
        initialize(net, {key: value for key, value in config.items() if key != "model"})
    except PipemegaError as error:
        return str(error)
    return ""


def chosen_vocabulary(auto: dict[str, Any], stage: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Return pipeline.vocabulary and the name of the plan with `auto`, and with `stage`."""
    torch.set_default_dtype(torch.float64)
    try:
        engines, losses = [], []
        for config in (auto, stage):
            vocabulary, length = config["model"]["vocab_size"], config["model"]["seq_length"]
            engine, *_ = initialize(gpt(GPTConfig.of(load(config), vocabulary)), config)
            tokens = torch.arange(2 * length).view(2, length) % vocabulary
            batches = iter([(tokens, tokens)] * engine.batch.num_microbatches)
            losses.append(engine.train_batch(batches))
            engines.append(engine)
        assert engines[0].plan.has_vocabulary
        return (
            [
                engines[0].config.pipeline.vocabulary,
                engines[0].plan.name,
                engines[1].config.pipeline.vocabulary,
            ],
            losses,
        )
    finally:
        torch.set_default_dtype(torch.float32)
