"""Undoing and repeating an optimizer step, with every optimizer, in one process."""

import copy
import math

import pytest
import torch
from torch import nn

from pipemega.config.sections.optimizer_section import PARAMS
from pipemega.config.sections.scheduler_section import DecayParams, SchedulerSection
from pipemega.distributed.mesh import Mesh
from pipemega.errors import PipelineError
from pipemega.kernels import Kernels
from pipemega.optimizer import (
    ModelParams,
    OptimizerStep,
    PlainMasterParams,
    PostValidatedStep,
    StepSettings,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.optimizer.mixed_precision import DynamicLossScale, Precision

OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    # Adds momentum to the gradients in place.
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Lamb": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}
# Size of the gradients of each step: 100 is clipped, inf overflows.
GRADIENTS = (0.01, 100.0, 0.01, math.inf, 0.02, 100.0, 0.01)


def build(kind, name, precision, device="cpu", clip=1.0, skip_nonfinite=True, **settings):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(9, 5, device=device))
    named = [("w", weight)]
    masters = PlainMasterParams(ModelParams(named), Mesh.single(device), precision=precision)
    groups = parameter_groups(masters.named.items())
    optimizer = build_optimizer(
        name, PARAMS[name](**OPTIMIZERS[name]), groups, kernels=Kernels.detect(torch.device(device))
    )
    step = kind(
        optimizer,
        masters,
        StepSettings(clip=clip, skip_nonfinite=skip_nonfinite),
        loss_scale=DynamicLossScale(8.0, window=1, hysteresis=1),
        schedule=build_schedule(
            optimizer, SchedulerSection(type="cosine", params=DecayParams(decay_steps=20))
        ),
        **settings,
    )
    return weight, step


def run(weight, step, gradients=GRADIENTS):
    """Return the reports, and the state after each settled step."""
    reports, states = [], []
    for size in gradients:
        (weight.float() * weight.detach().float().sign() * size).sum().backward()
        step.gradients.flats[next(iter(step.gradients.flats))].mul_(step.loss_scale.scale)
        # A weight that differs from 1: the gradient factor is not only the loss scale.
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
    synchronous = run(*build(OptimizerStep, name, precision, device))
    weight, step = build(PostValidatedStep, name, precision, device, sync_after=0)
    validated = run(weight, step)
    assert step.rollbacks == sum(size >= 100 for size in GRADIENTS)
    assert validated[0] == synchronous[0]
    for got, want in zip(validated[1], synchronous[1], strict=True):
        assert_same(got, want)


def assert_same(got, want):
    assert type(got) is type(want)
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, want)
    elif isinstance(got, dict):
        assert got.keys() == want.keys()
        for key in got:
            assert_same(got[key], want[key])
    else:
        assert got == want


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repeated_step_equals_the_synchronous_step(name, dtype):
    check(name, dtype)


def test_before_settle_a_step_is_the_unclipped_step():
    weight, step = build(PostValidatedStep, "SGD", Precision(), sync_after=0)
    _, unclipped = build(OptimizerStep, "SGD", Precision(), clip=0.0)
    for parameter in (weight, unclipped.masters.named["w"]):
        (parameter.sum() * 800.0).backward()
    report = step(1.0, 1.0, 1)
    unclipped(1.0, 1.0, 1)
    assert torch.equal(weight, unclipped.masters.named["w"])
    # The loss is known at once; reading `last` waits for the norm and changes nothing.
    assert (report.loss, math.isnan(report.grad_norm)) == (1.0, True)
    assert step.take_reports() == []
    assert step.last.grad_norm == pytest.approx(100.0 * math.sqrt(45))
    assert step.last.rollbacks == 1
    assert torch.equal(weight, unclipped.masters.named["w"])
    assert step.settle() is False
    assert not torch.equal(weight, unclipped.masters.named["w"])
    assert step.settle() is True
    assert [taken.rollbacks for taken in step.take_reports()] == [1]


def test_the_backup_is_allocated_once():
    weight, step = build(PostValidatedStep, "AdamW", Precision(), sync_after=0)
    run(weight, step, [0.1])
    addresses, sizes = set(), set()
    for _ in range(3):
        run(weight, step, [0.1, 100.0])
        addresses.add(tuple(copy.data_ptr() for copy in step._backup._copies))
        sizes.add(step._backup.bytes)
    assert len(addresses) == 1
    # Gradient (in an aligned slot), weight, two moments and the step counter.
    assert sizes == {4 * (64 + 3 * 45 + 1)}


def test_after_a_nonfinite_error_the_parameters_are_those_before_the_step():
    weight, step = build(
        PostValidatedStep, "AdamW", Precision(), skip_nonfinite=False, sync_after=0
    )
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
