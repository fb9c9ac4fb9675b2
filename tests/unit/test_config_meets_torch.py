"""What the config says of optimizers and schedules is what torch and the optimizer room take."""

import inspect

import pytest
import torch

from pipemega.config import load, optimizer, scheduler
from pipemega.optimizer.lr_schedules import build_schedule
from tests.paper.config_tree import BASE, REQUIRED

TORCHS = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}


def test_every_class_of_torch_optim_is_known_to_the_config():
    known = set(optimizer.PARAMS) | set(optimizer.REFUSED)
    assert TORCHS - known == set()


@pytest.mark.parametrize("name", sorted(TORCHS & set(optimizer.PARAMS) - {"Adam", "AdamW"}))
def test_every_parameter_of_a_torch_optimizer_is_a_key_and_no_other(name):
    taken = set(inspect.signature(getattr(torch.optim, name)).parameters)
    # Differentiating through the step makes no sense in training.
    assert set(optimizer.PARAMS[name].model_fields) - {"max_grad_norm"} == taken - {
        "params", "differentiable",
    }  # fmt: skip


@pytest.mark.parametrize("name", scheduler.PARAMS)
def test_every_schedule_is_built_from_what_the_config_makes_of_it(name):
    params = REQUIRED.get(scheduler.PARAMS[name], {})
    section = load(BASE | {"scheduler": {"type": name, "params": params}}).scheduler
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if "cycle_momentum" in type(section.params).model_fields:
        sgd = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    built = build_schedule(sgd, section.type, section.params.arguments(100), total_steps=100)
    assert len(built.get_last_lr()) == 1
