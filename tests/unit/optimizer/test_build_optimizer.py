"""Optimizers are built from `optimizer.type` and `optimizer.params`."""

import re

import pytest
import torch
from torch import nn

from pipemega.config import load
from pipemega.config.sections.optimizer_section import AdamParams
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.optimizer import Lamb, build_optimizer, parameter_groups
from pipemega.parameters import Shard, attach_shard

CPU = Kernels.detect("cpu")


def groups():
    return [{"params": [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]}]


def build(name, params, tensor=None):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": params}}
    section = load(config).optimizer
    return build_optimizer(section.type, section.params, groups(), kernels=CPU, tensor=tensor)


def test_adam_has_deepspeeds_defaults_and_decays_like_adamw():
    for name in ("Adam", "adam", "AdamW"):
        optimizer = build(name, {"betas": [0.8, 0.9], "torch_adam": False})
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.defaults["lr"] == 1e-3
        assert optimizer.defaults["betas"] == (0.8, 0.9)
        assert optimizer.defaults["weight_decay"] == 0
        assert optimizer.defaults["fused"] is True


def test_adam_adds_the_decay_to_the_gradient_if_adam_w_mode_is_false():
    assert type(build("Adam", {"adam_w_mode": False})) is torch.optim.Adam


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop",
     "Adafactor"],
)  # fmt: skip
def test_any_optimizer_of_torch_is_built_by_name_and_steps(name):
    optimizer = build(name, {"lr": 0.1})
    assert type(optimizer) is getattr(torch.optim, name)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((p < 1).all() for p in optimizer.param_groups[0]["params"])


def test_fused_and_foreach_of_the_user_are_kept():
    assert build("AdamW", {"foreach": True}).defaults["foreach"] is True
    assert build("AdamW", {"foreach": True}).defaults["fused"] is None


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Adamm", {}, "optimizer.type 'Adamm' is not known; did you mean 'Adam"),
        ("AdamW", {"weight_decy": 0.1},
         "unknown key 'optimizer.params.weight_decy'; did you mean 'weight_decay'?"),
        ("SGD", {"beta": 0.1}, "unknown key 'optimizer.params.beta'"),
        ("Adam", {"max_grad_norm": 1.0}, "set gradient_clipping at the top level"),
        ("AdamW", {"lr": -1.0}, "optimizer.params.lr must be a number >= 0, not -1.0"),
        ("RMSprop", {"weight_decay": -1.0}, "optimizer.params.weight_decay must be a number >= 0"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0},
         "optimizer.params: Lamb rejects them: min_coeff (2.0) must be above 0 and not"),
        ("Lamb", {"betas": [1.0, 0.9]}, "optimizer.params.betas must be [a number >= 0 and < 1"),
        ("Lamb", {"lr": -1.0}, "optimizer.params.lr must be a number >= 0, not -1.0"),
        ("LBFGS", {}, "optimizer.type cannot be 'LBFGS': it evaluates the model several"),
        ("SparseAdam", {}, "optimizer.type cannot be 'SparseAdam'"),
        ("Adam", {"bias_correction": False}, "bias_correction is false, which only NVIDIA apex"),
        ("SGD", {"nesterov": True}, "optimizer.params: SGD rejects them: Nesterov momentum"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_built_is_refused_by_the_name_of_its_key(name, params, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(name, params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": (1.0, 0.9)}, "betas are (1.0, 0.9): each must be in [0, 1)"),
        ({"lr": -1.0}, "lr is -1.0"),
    ],
)
def test_lamb_checks_its_arguments_when_it_is_constructed_directly(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Lamb([nn.Parameter(torch.zeros(1))], **arguments)


def test_an_optimizer_of_whole_matrices_is_refused_if_tensor_ranks_shard_them():
    with pytest.raises(ConfigError, match=r"'Adafactor' needs whole matrices, and mesh.tensor \(2"):
        build("Adafactor", {}, tensor=Axis("tensor", (0, 1)))
    assert build("SGD", {}, tensor=Axis("tensor", (0, 1)))


def test_parameters_of_one_logical_dim_get_no_weight_decay():
    weight, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    cut = attach_shard(nn.Parameter(torch.zeros(2)), Shard((4,), dim=0, ranges=((0, 2),)))
    named = [("w", weight), ("b", bias), ("c", cut)]
    decayed, spared = parameter_groups(named, decay_norms_and_biases=False)
    assert [id(p) for p in decayed["params"]] == [id(weight)]
    assert [id(p) for p in spared["params"]] == [id(bias), id(cut)]
    optimizer = build_optimizer(
        "AdamW", AdamParams(weight_decay=0.1), [decayed, spared], kernels=CPU
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert [len(g["params"]) for g in parameter_groups(named)] == [3]


def test_a_rank_without_trainable_parameters_has_the_same_parameter_groups():
    empty = parameter_groups([], decay_norms_and_biases=False)
    optimizer = build_optimizer("AdamW", AdamParams(), empty, kernels=CPU)
    optimizer.step()
    assert len(optimizer.param_groups) == 2


def test_the_first_step_of_lamb_is_the_formula_of_the_paper():
    weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))  # length 5
    gradient = torch.tensor([0.5, -2.0], dtype=torch.float64)
    weight.grad = gradient.clone()
    Lamb([weight], lr=0.1, eps=1e-6, weight_decay=0.01).step()
    start = torch.tensor([3.0, 4.0], dtype=torch.float64)
    # After one step the corrected moments are the gradient and its square.
    update = gradient / (gradient.abs() + 1e-6) + 0.01 * start
    expected = start - 0.1 * (5 / update.norm()) * update
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("start", "ratio"), [(1000.0, 10.0), (0.001, 0.01), (0.0, 1.0)])
def test_lamb_bounds_the_trust_ratio_and_updates_zero_parameters(start, ratio):
    weight = nn.Parameter(torch.full((4,), start, dtype=torch.float64))
    weight.grad = torch.ones(4, dtype=torch.float64)
    Lamb([weight], lr=0.5, eps=0.0).step()
    assert weight.tolist() == pytest.approx(4 * [start - 0.5 * ratio], rel=1e-12)
