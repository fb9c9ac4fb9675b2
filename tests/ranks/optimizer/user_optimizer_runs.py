"""Runs with optimizers and schedulers of the user, on every rank of a mesh."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.errors import ConfigError
from pipemega.models import GPTConfig, gpt
from tests.ranks.training_runs import VOCAB, data
from tests.unit.optimizer.user_optimizers import Corrected, Factored, GlobalNorm, Lion, SmoothLion

GROUPS = [{"params": "norm|bias", "weight_decay": 0.0}, {"params": r"layers\.0\.", "lr": 0.004}]


def skip_empty_groups(params: Any) -> Any:
    return Lion([group for group in params if group["params"]])


def drop_on_rank_1(params: Any) -> Any:
    groups = [{**group, "params": list(group["params"])} for group in params]
    if torch.distributed.get_rank() == 1:
        groups[0]["params"].pop()
    return Lion(groups)


def schedule_of_another_optimizer(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)


OPTIMIZERS: dict[str, Any] = {
    "Lion": lambda params: Lion(params, lr=0.01, weight_decay=0.1),
    "SmoothLion": lambda params: SmoothLion(params, lr=0.01, weight_decay=0.1),
    "Corrected": lambda params: Corrected(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Factored": Factored,
    "GlobalNorm": GlobalNorm,
    "Muon": lambda params: torch.optim.Muon(params, lr=0.01),
    "drop_all": lambda params: Lion([{**group, "params": []} for group in params]),
    "skip_empty_groups": skip_empty_groups,
    "drop_on_rank_1": drop_on_rank_1,
}
SCHEDULERS: dict[str, Any] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "other optimizer": schedule_of_another_optimizer,
}


def build(case: Mapping[str, Any]) -> Engine:
    """Build an engine.

    Args:
        case: "config"; the names of "optimizer" and "schedule" here; the "groups".
    """
    config = load(case["config"])
    engine, *_ = initialize(
        gpt(GPTConfig.of(config, VOCAB)),
        config,
        optimizer=OPTIMIZERS[case["optimizer"]],
        lr_scheduler=SCHEDULERS.get(case.get("schedule", "")),
        model_parameters=case.get("groups"),
    )
    return engine


def train_all(
    cases: list[Mapping[str, Any]], steps: int = 3, save: int = 2
) -> list[dict[str, Any]]:
    """Train each case; resume those with a "source" from it first, save those with a "folder".

    Returns:
        the losses and rates of all steps by their number, and the parameters.
    """
    torch.set_default_dtype(torch.float64)
    try:
        return [_train(case, steps, save) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)


def _train(case: Mapping[str, Any], steps: int, save: int) -> dict[str, Any]:
    engine = build(case)
    if "source" in case:
        # State of a step that loading has to replace.
        engine.train_batch(data(engine, 0))
        engine.load_checkpoint(case["source"])
    seen: dict[str, Any] = {"loss": {}, "rates": {}}
    while engine.global_steps < steps:
        step = engine.global_steps
        seen["loss"][step] = engine.train_batch(data(engine, step))
        engine.settle()
        assert engine.lr_scheduler is not None
        seen["rates"][step] = engine.lr_scheduler.get_last_lr()
        if "folder" in case and engine.global_steps == save:
            engine.save_checkpoint(case["folder"])
    parameters = engine.parameter_state()
    return seen | {"parameters": {n: p.double().numpy() for n, p in parameters.items()}}


def errors_of(cases: list[Mapping[str, Any]]) -> list[str]:
    """Return the error of each case on this rank."""
    errors = []
    for case in cases:
        try:
            build(case)
        except ConfigError as error:
            errors.append(str(error) if error.on_every_rank else f"on one rank: {error}")
        else:
            errors.append("")
    return errors
