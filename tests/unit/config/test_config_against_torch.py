"""The keys of optimizers and LR schedules match the parameters of torch and of our schedules."""

import inspect

import pytest
import torch

from pipemega.config import load
from pipemega.config.sections import optimizer_section, scheduler_section
from pipemega.config.sections.scheduler_section import RunLength
from pipemega.optimizer.lr_schedules import build_schedule
from tests.paper.config.config_tree import BASE, REQUIRED

TORCH_OPTIMIZERS = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}


def test_every_class_of_torch_optim_is_known_to_the_config():
    known = set(optimizer_section.PARAMS) | set(optimizer_section.REFUSED)
    assert TORCH_OPTIMIZERS - known == set()


@pytest.mark.parametrize(
    "name", sorted(TORCH_OPTIMIZERS & set(optimizer_section.PARAMS) - {"Adam", "AdamW"})
)
def test_the_keys_of_a_torch_optimizer_are_its_parameters(name):
    taken = set(inspect.signature(getattr(torch.optim, name)).parameters)
    # Training does not differentiate through the step.
    assert set(optimizer_section.PARAMS[name].model_fields) - {"max_grad_norm"} == taken - {
        "params", "differentiable",
    }  # fmt: skip


@pytest.mark.parametrize("name", scheduler_section.PARAMS)
def test_every_lr_schedule_is_built_from_its_section(name):
    params = REQUIRED.get(scheduler_section.PARAMS[name], {})
    section = load(BASE | {"scheduler": {"type": name, "params": params}}).scheduler
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if "cycle_momentum" in type(section.params).model_fields:
        sgd = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    built = build_schedule(sgd, section, RunLength(steps=100))
    assert len(built.get_last_lr()) == 1
