"""The optimizer step on a GPU against the same step on the CPU."""

import copy
import math

import pytest
import torch
from torch import nn

from pipemega.config.sections.optimizer_section import PARAMS
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.kernels import Kernels
from pipemega.optimizer import (
    ModelParams,
    OptimizerStep,
    PlainMasterParams,
    StepSettings,
    build_optimizer,
    parameter_groups,
)
from pipemega.optimizer.mixed_precision import DynamicLossScale, Precision
from tests.gpu.devices import ONE_DEVICE, one_gpu

pytestmark = one_gpu


def build(weight, precision, name, host=None, clip=0.0, **settings):
    model = ModelParams([("w", weight)])
    masters = PlainMasterParams(model, Mesh.single(weight.device), precision=precision, host=host)
    groups = parameter_groups(masters.named.items())
    kernels = Kernels.detect(weight.device if host is None else host.location)
    return OptimizerStep(
        build_optimizer(name, PARAMS[name].validated({"lr": 0.01}), groups, kernels=kernels),
        masters,
        StepSettings(clip=clip, skip_nonfinite=precision.skip_nonfinite),
        **settings,
    )


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb", "RMSprop"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_step_on_the_gpu_equals_the_step_on_the_cpu(name, dtype):
    start, gradients = torch.randn(300), torch.randn(3, 300)
    results = []
    for device in ("cpu", ONE_DEVICE):
        weight = nn.Parameter(start.to(device, copy=True))
        step = build(weight, Precision(dtype), name, clip=1.0)
        for gradient in gradients:
            (weight.float() * gradient.to(device)).sum().backward()
            report = step(torch.tensor(1.0, device=device), 1.0, 1)
        state = step.state_dict()["parameters"]["w"]
        results.append((report.grad_norm, state.get("master", weight).detach().cpu()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_step_with_offloaded_state_equals_the_step_on_the_cpu(dtype, pin):
    start, gradients = torch.randn(300), torch.randn(3, 300)
    results = []
    memory = HostMemory(torch.device(ONE_DEVICE), pin=pin)
    for device, host in (("cpu", None), (ONE_DEVICE, memory)):
        weight = nn.Parameter(start.to(device, copy=True))
        step = build(weight, Precision(dtype), "AdamW", host, clip=1.0)
        for gradient in gradients:
            (weight.float() * gradient.to(device)).sum().backward()
            step(torch.tensor(1.0, device=device), 1.0, 1)
        (master,) = step.masters.named.values()
        assert master.device.type == "cpu"
        assert master.is_pinned() == (pin and device == "cuda")
        state = step.state_dict()["parameters"]["w"]
        assert state["exp_avg"].device.type == "cpu"
        results.append(weight.detach().float().cpu())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_fp16_recovers_from_an_overflow_and_loads_its_state_on_the_gpu():
    weight = nn.Parameter(torch.ones(4, device=ONE_DEVICE))
    fp16 = Precision(torch.float16, skip_nonfinite=True)
    step = build(weight, fp16, "AdamW", loss_scale=DynamicLossScale(2.0**17, hysteresis=1))
    reports = []
    for _ in range(3):
        (weight * step.loss_scale.scale).sum().backward()  # fp16 ends at 65504
        reports.append(step(1.0, 1.0, 1))
    assert [report.skipped for report in reports] == [True, True, False]
    assert reports[-1].grad_norm == pytest.approx(math.sqrt(4))
    state = copy.deepcopy(step.state_dict())
    other = build(nn.Parameter(torch.zeros(4, device=ONE_DEVICE)), fp16, "AdamW",
                  loss_scale=DynamicLossScale())  # fmt: skip
    other.load_state_dict(state)
    assert torch.equal(
        other.state_dict()["parameters"]["w"]["master"], state["parameters"]["w"]["master"]
    )
    assert other.loss_scale.scale == 2.0**15
