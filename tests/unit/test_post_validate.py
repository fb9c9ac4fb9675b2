"""A step that is taken back and done again, under every optimizer, in one process."""

import copy
import math

import pytest
import torch
from torch import nn

from pipemega.errors import PipelineError
from pipemega.kernels import Kernels
from pipemega.mesh import Mesh
from pipemega.optimizer import (
    OptimizerStep,
    PostValidatedStep,
    Targets,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.precision import DynamicLossScale, Precision

OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    # Adds momentum to the gradients where they lie.
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Lamb": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}
# Of the steps, in order: as they are, clipped, overflowing.
GRADIENTS = (0.01, 100.0, 0.01, math.inf, 0.02, 100.0, 0.01)


def build(kind, name, precision, device="cpu", clip=1.0, **settings):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(9, 5, device=device))
    named = [("w", weight)]
    targets = Targets(named, Mesh.single(device), precision=precision)
    groups = parameter_groups(targets.named.items())
    optimizer = build_optimizer(
        name, OPTIMIZERS[name], groups, kernels=Kernels.detect(torch.device(device))
    )
    step = kind(
        optimizer,
        targets,
        clip=clip,
        loss_scale=DynamicLossScale(8.0, window=1, hysteresis=1),
        schedule=build_schedule(optimizer, "cosine", {"decay_steps": 20}),
        **{"skip_nonfinite": True} | settings,
    )
    return weight, step


def run(weight, step, gradients=GRADIENTS):
    """What each step leaves, once it stands."""
    reports, states = [], []
    for size in gradients:
        (weight.float() * weight.detach().float().sign() * size).sum().backward()
        step.gradients.flats[next(iter(step.gradients.flats))].mul_(step.loss_scale.scale)
        # Not 1: the factor of gradients is more than the loss scale.
        step(torch.tensor(1.0), 3.0, 2)
        step.settle()
        reports += [{**vars(report), "rollbacks": 0} for report in step.take_reports()]
        state = copy.deepcopy(step.state_dict()) | {"weight": weight.detach().clone()}
        states.append(state | {"settings": copy.deepcopy(_settings(step))})
    return [*map(repr, reports)], states


def _settings(step):
    return [
        {k: v for k, v in group.items() if k != "params"} for group in step.optimizer.param_groups
    ]


def check(name, dtype, device="cpu"):
    precision = Precision(dtype)
    fenced = run(*build(OptimizerStep, name, precision, device))
    weight, step = build(PostValidatedStep, name, precision, device, quiet_steps=0)
    free = run(weight, step)
    assert step.rollbacks == sum(size >= 100 for size in GRADIENTS)
    assert free[0] == fenced[0]
    for mine, theirs in zip(free[1], fenced[1], strict=True):
        assert_same(mine, theirs)


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])
    else:
        assert mine == theirs


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_done_again_is_the_step_that_waited(name, dtype):
    check(name, dtype)


def test_until_it_is_settled_a_step_is_as_if_nothing_clipped():
    weight, step = build(PostValidatedStep, "SGD", Precision(), quiet_steps=0)
    _, unclipped = build(OptimizerStep, "SGD", Precision(), clip=0.0)
    for parameter in (weight, unclipped.targets.named["w"]):
        (parameter.sum() * 800.0).backward()
    report = step(1.0, 1.0, 1)
    unclipped(1.0, 1.0, 1)
    assert torch.equal(weight, unclipped.targets.named["w"])
    # The loss is known; the norm is, once somebody asks, and asking changes nothing.
    assert (report.loss, math.isnan(report.grad_norm)) == (1.0, True)
    assert step.take_reports() == []
    assert step.last.grad_norm == pytest.approx(100.0 * math.sqrt(45))
    assert step.last.rollbacks == 1
    assert torch.equal(weight, unclipped.targets.named["w"])
    assert step.settle() is False
    assert not torch.equal(weight, unclipped.targets.named["w"])
    assert step.settle() is True
    assert [taken.rollbacks for taken in step.take_reports()] == [1]


def test_the_copy_is_made_in_the_same_room_every_time():
    weight, step = build(PostValidatedStep, "AdamW", Precision(), quiet_steps=0)
    run(weight, step, [0.1])
    places, kept = set(), set()
    for _ in range(3):
        run(weight, step, [0.1, 100.0])
        places.add(tuple(copy.data_ptr() for copy in step._backup._copies))
        kept.add(step._backup.bytes)
    assert len(places) == 1
    # Gradient (in an aligned slot), weight, two moments, and the step.
    assert kept == {4 * (64 + 3 * 45 + 1)}


def test_a_gradient_that_ends_the_run_leaves_the_parameters_before_it():
    weight, step = build(PostValidatedStep, "AdamW", Precision(), quiet_steps=0)
    step._skip_nonfinite = False
    run(weight, step, [0.1])
    before = weight.detach().clone()
    weight.sum().mul(math.inf).backward()
    step(1.0, 1.0, 1)
    assert not torch.equal(weight, before)
    with pytest.raises(PipelineError, match="gradient norm is inf at step 2") as caught:
        step.settle()
    assert caught.value.on_every_rank
    assert torch.equal(weight, before)
    assert not weight.grad.any()
