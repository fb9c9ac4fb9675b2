"""Offloaded masters give bitwise the same steps, with copies that arrive at the latest moment."""

import copy
from typing import Any

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
    PostValidatedStep,
    StepSettings,
    build_optimizer,
    parameter_groups,
)
from pipemega.optimizer.masters import Offload
from pipemega.optimizer.mixed_precision import DynamicLossScale, Precision
from pipemega.optimizer.user_optimizer import build_user_optimizer
from tests.unit.late_copies import LateHostMemory
from tests.unit.optimizer.user_optimizers import Corrected, Lion

CPU = torch.device("cpu")
SHAPES = {"layers.0.weight": (9, 5), "layers.0.bias": (9,), "layers.1.weight": (3, 9)}
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, skip_nonfinite=True),
    "gradients in bf16": Precision(torch.bfloat16, torch.bfloat16),
    "gradients in fp64": Precision(grad_dtype=torch.float64),
}


OF_USERS = {"Lion": Lion, "Corrected": Corrected}


def build(
    precision: Precision,
    host: HostMemory | None,
    name: str = "AdamW",
    kind: type[OptimizerStep] = OptimizerStep,
    **settings: Any,
) -> OptimizerStep:
    generator = torch.Generator().manual_seed(0)
    named = [
        (name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    ]
    masters = PlainMasterParams(
        ModelParams(named, num_layers=2), Mesh.single(CPU), precision=precision, host=host
    )
    groups = parameter_groups(masters.named.items())
    if name in OF_USERS:
        optimizer = build_user_optimizer(
            OF_USERS[name], groups, masters.named, (), Mesh.single(CPU).world
        )
    else:
        params = PARAMS[name](lr=0.01)
        optimizer = build_optimizer(name, params, groups, kernels=Kernels.detect(CPU))
    return kind(
        optimizer,
        masters,
        StepSettings(clip=1.0, skip_nonfinite=precision.skip_nonfinite),
        loss_scale=DynamicLossScale(8.0, hysteresis=1) if precision.skip_nonfinite else None,
        **settings,
    )


def train(step: OptimizerStep, sizes: tuple[float, ...]) -> list[Any]:
    """Do steps with gradients of these sizes; return reports and everything that they changed."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    params = [(slot.name, slot.parameter) for slot in step.gradients.slots]
    for size in sizes:
        for _, parameter in params:
            noise = torch.randn(parameter.shape, generator=generator)
            (parameter.float() * noise * size * step.loss_scale.scale).sum().backward()
        step(torch.tensor(1.0), 3.0, 2)
        step.settle()
        step.masters.wait_for_offload()
        seen += [repr({**vars(r), "rollbacks": 0}) for r in step.take_reports()]
        seen.append({name: parameter.detach().clone() for name, parameter in params})
        state = copy.deepcopy(step.state_dict()["parameters"])
        seen += [{key: entry for key, entry in state[n].items() if key != "master"} for n in SHAPES]
    return seen


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Lamb", *OF_USERS])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_offloaded_steps_equal_steps_on_the_device_bitwise(precision: str, optimizer: str) -> None:
    sizes = (0.01, 100.0, 0.02) + (float("inf"), 0.01) * PRECISIONS[precision].skip_nonfinite
    on_device = train(build(PRECISIONS[precision], None, optimizer), sizes)
    memory = LateHostMemory.reset(CPU)
    offloaded = build(PRECISIONS[precision], memory, optimizer)
    for one, other in zip(train(offloaded, sizes), on_device, strict=True):
        assert_same(one, other)
    assert not any(torch.isnan(master).any() for master in offloaded.masters.named.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_undone_offloaded_step_equals_the_synchronous_step(precision: str) -> None:
    sizes = (0.01, 100.0, 0.01)
    on_device = train(build(PRECISIONS[precision], None), sizes)
    memory = LateHostMemory.reset(CPU)
    step = build(PRECISIONS[precision], memory, kind=PostValidatedStep, sync_after=0)
    for one, other in zip(train(step, sizes), on_device, strict=True):
        assert_same(one, other)
    assert isinstance(step, PostValidatedStep)
    assert step.rollbacks == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_copies_all_gradients_at_once_and_waits_twice(precision: str) -> None:
    memory = LateHostMemory.reset(CPU)
    step = build(PRECISIONS[precision], memory)
    train(step, (0.01,))
    memory.log.clear()
    step.gradients.flats[torch.float32].fill_(0.01)
    step(torch.tensor(1.0), 3.0, 2)
    step.gradients.flats[torch.float32].fill_(0.02)
    step(torch.tensor(1.0), 3.0, 2)
    what = [entry for _, entry in memory.log]
    first = ["copies", "records", "synchronizes", *len(SHAPES) * ["copies"], "records"]
    # Before the parameters are written again, their last copies must be complete.
    second = [*first[:3], "synchronizes", *first[3:]]
    assert what == first + second


def test_all_host_buffers_are_one_allocation() -> None:
    memory = LateHostMemory.reset(CPU)
    step = build(Precision(torch.bfloat16, torch.bfloat16), memory)
    train(step, (0.01,))
    offload = step.masters.offload
    assert isinstance(offload, Offload)
    used = [*step.masters.named.values(), *(m.grad for m in step.masters.named.values())]
    assert len({tensor.untyped_storage().data_ptr() for tensor in used if tensor is not None}) == 1
    # Masters and gradients in fp32, parameters in bf16; the received gradients with their padding.
    exact = 10 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert offload.nbytes == exact + 2 * 3 * 64


def test_loading_waits_for_the_copies_that_still_read_the_masters() -> None:
    memory = LateHostMemory.reset(CPU)
    step = build(Precision(), memory)
    train(step, (0.01,))
    state, parameters = copy.deepcopy(step.state_dict()), copy.deepcopy(_parameters(step))
    # The copies of this step are not complete: they still read the masters.
    step.gradients.flats[torch.float32].fill_(0.3)
    step(torch.tensor(1.0), 3.0, 2)
    with torch.no_grad():
        for name, parameter in _parameters(step).items():
            parameter.copy_(parameters[name])
    step.load_state_dict(state)
    # Checks all copies so far.
    memory.record().synchronize()
    for name, parameter in _parameters(step).items():
        assert torch.equal(parameter, parameters[name])
        assert torch.equal(step.masters.named[name], parameters[name])


def _parameters(step: OptimizerStep) -> dict[str, nn.Parameter]:
    return {slot.name: slot.parameter for slot in step.gradients.slots}
