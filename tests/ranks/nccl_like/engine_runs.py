"""Runs of the engine on the ranks of a process group; results are equal if every bit is."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from pipemega import PipelineModule
from pipemega.engine.engine import Engine
from pipemega.fault_tolerance import error_propagation
from pipemega.optimizer import zero
from pipemega.training.generation import generate
from tests.ranks import small_models, training_runs
from tests.ranks.small_models import WIDTH, microbatches

# Of each wait: far longer than a step, and short, because a hang costs this time.
SECONDS = 20


class Case(NamedTuple):
    """A training run.

    Args:
        model: a function of `small_models`, or "gpt".
        depth: the argument `depth` of the function of a small model.
        config: changes to the config.
        steps: how many steps are trained; an evaluation runs after the first.
    """

    model: str
    config: Mapping[str, Any]
    depth: int = 10
    steps: int = 2


class Result(NamedTuple):
    """Losses of the steps, loss of the evaluation, and a hash of the final parameters."""

    losses: list[float]
    evaluation: float
    parameters: str


def train_all(cases: Sequence[Case]) -> list[Result]:
    torch.set_default_dtype(torch.float64)
    try:
        return [_train(case) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)


def _train(case: Case) -> Result:
    engine = build(case)
    count, losses, evaluation = engine.batch.num_microbatches, [], 0.0
    for step in range(case.steps):
        if engine.loader is not None:
            losses.append(engine.train_batch())
        elif case.model == "gpt":
            losses.append(engine.train_batch(training_runs.data(engine, step)))
        else:
            losses.append(engine.train_batch(microbatches(step, count)))
        if step == 0:
            data = microbatches(50, 3) if case.model != "gpt" else training_runs.data(engine, 50)
            evaluation = float(engine.eval_batch(data, 3 if case.model != "gpt" else None))
    return Result(losses, evaluation, hash_of_parameters(engine))


def build(case: Case) -> Engine:
    config = dict(case.config)
    config["mesh"] = {"timeout_seconds": SECONDS, **config.get("mesh", {})}
    if case.model == "gpt":
        return training_runs.build(training_runs.settings(**config))
    net = getattr(small_models, case.model)(case.depth)
    if config.get("pipeline", {}).get("shapes") == "declared":
        boundary = torch.empty(3, 2, WIDTH, device="meta", requires_grad=True)
        net = PipelineModule(net.specs, small_models.squares, boundary=boundary)
    return small_models.engine_of(net, **config)


def hash_of_parameters(engine: Engine) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(engine.parameter_state().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def train_and_count_reduce_scatters(cases: Sequence[Case]) -> tuple[list[Result], int]:
    scatter = zero.reduce_scatter_single
    with mock.patch.object(zero, "reduce_scatter_single", wraps=scatter) as calls:
        return train_all(cases), calls.call_count


def generate_tokens(config: Mapping[str, Any]) -> list[int]:
    engine = build(Case("gpt", config))
    engine.train_batch(training_runs.data(engine, 0))
    sizes = {"seq_length": training_runs.LENGTH, "vocab_size": training_runs.VOCAB}
    return generate(engine, [3, 1, 4], 6, temperature=1.0, **sizes)


def sleep_before_the_second_step(rank: int, config: Mapping[str, Any]) -> None:
    """Train two steps; `rank` comes to the second one after the others have reported."""
    engine = training_runs.build(config)
    engine.train_batch(training_runs.data(engine, 0))
    if engine.mesh.rank == rank:
        time.sleep(2.5)
    with mock.patch.object(error_propagation, "_COLLECT_SECONDS", 0.7):
        engine.train_batch(training_runs.data(engine, 1))
