"""From the config's words to a torch optimizer."""

import re

import pytest
import torch
from torch import nn

from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.mesh import Axis
from pipemega.optimizer import Lamb, build_optimizer, parameter_groups
from pipemega.parameters import Shard, describe

CPU = Kernels.detect("cpu")


def groups():
    return [{"params": [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]}]


def build(name, params, tensor=None):
    return build_optimizer(name, params, groups(), kernels=CPU, tensor=tensor)


def test_adam_has_deepspeeds_defaults_and_decays_like_adamw():
    for name in ("Adam", "adam", "AdamW"):
        optimizer = build(name, {"betas": [0.8, 0.9], "torch_adam": False})
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.defaults["lr"] == 1e-3
        assert optimizer.defaults["betas"] == (0.8, 0.9)
        assert optimizer.defaults["weight_decay"] == 0
        assert optimizer.defaults["fused"] is True


def test_adam_decays_by_the_gradient_when_asked_to():
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


def test_what_the_user_says_of_fused_and_foreach_stands():
    assert build("AdamW", {"foreach": True}).defaults["foreach"] is True
    assert build("AdamW", {"foreach": True}).defaults["fused"] is None


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Adamm", {}, "unknown optimizer.type 'Adamm'; did you mean 'Adam"),
        ("AdamW", {"weight_decy": 0.1},
         "unknown key 'optimizer.params.weight_decy' of AdamW; did you mean 'weight_decay'?"),
        ("SGD", {"beta": 0.1}, "unknown key 'optimizer.params.beta' of SGD"),
        ("Adam", {"max_grad_norm": 1.0}, "max_grad_norm is not taken here: set gradient_clipping"),
        ("AdamW", {"lr": -1.0}, "optimizer.params: AdamW refuses them: Invalid learning rate"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff (2.0) must be above 0 and not"),
        ("Lamb", {"betas": [1.0, 0.9]}, "betas are (1.0, 0.9): each must be in [0, 1)"),
        ("Lamb", {"lr": -1.0}, "Lamb refuses them: lr is -1.0"),
        ("LBFGS", {}, "optimizer.type 'LBFGS' does not work here: it evaluates the model several"),
        ("SparseAdam", {}, "'SparseAdam' does not work here"),
        ("Adam", {"bias_correction": False}, "bias_correction is false, which only NVIDIA apex"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_is_refused_by_the_name_of_its_key(name, params, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(name, params)


def test_an_optimizer_of_whole_matrices_is_refused_where_tensor_ranks_cut_them():
    with pytest.raises(
        ConfigError, match=r"'Adafactor' works on whole matrices, and mesh.tensor \(2"
    ):
        build("Adafactor", {}, tensor=Axis("tensor", (0, 1)))
    assert build("SGD", {}, tensor=Axis("tensor", (0, 1)))


def test_norms_and_biases_are_told_by_their_logical_shape_and_spared_the_decay():
    weight, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    cut = describe(nn.Parameter(torch.zeros(2)), Shard((4,), dim=0, ranges=((0, 2),)))
    named = [("w", weight), ("b", bias), ("c", cut)]
    decayed, spared = parameter_groups(named, decay_norms_and_biases=False)
    assert [id(p) for p in decayed["params"]] == [id(weight)]
    assert [id(p) for p in spared["params"]] == [id(bias), id(cut)]
    optimizer = build_optimizer("AdamW", {"weight_decay": 0.1}, [decayed, spared], kernels=CPU)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert [len(g["params"]) for g in parameter_groups(named)] == [3]


def test_a_rank_without_trainable_parameters_has_an_optimizer_like_the_others():
    empty = parameter_groups([], decay_norms_and_biases=False)
    optimizer = build_optimizer("AdamW", {}, empty, kernels=CPU)
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
def test_lamb_bounds_the_trust_ratio_and_moves_what_is_zero(start, ratio):
    weight = nn.Parameter(torch.full((4,), start, dtype=torch.float64))
    weight.grad = torch.ones(4, dtype=torch.float64)
    Lamb([weight], lr=0.5, eps=0.0).step()
    assert weight.tolist() == pytest.approx(4 * [start - 0.5 * ratio], rel=1e-12)
