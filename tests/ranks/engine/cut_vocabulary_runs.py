"""Runs with a cut vocabulary, on one rank of several."""

from pathlib import Path
from typing import Any

import torch

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.config import load
from pipemega.errors import PipemegaError
from pipemega.models import GPTConfig, gpt
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
        losses = [each.train_batch(training_runs.data(each, 1)) for each in (engine, other)]
        losses += [each.eval_batch(training_runs.data(each, 2)) for each in (engine, other)]
        return [equal, *losses]
    finally:
        torch.set_default_dtype(torch.float32)


def refused_outputs(config: dict[str, Any]) -> str:
    """Return the error of an evaluation that wants outputs."""
    engine = training_runs.build(config)
    try:
        engine.eval_batch(training_runs.data(engine, 0), return_outputs=True)
    except PipemegaError as error:
        return str(error)
    return ""


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
