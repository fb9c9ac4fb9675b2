"""Groups of parameters by logical name."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega.config import load
from pipemega.config.sections.optimizer_section import GroupSpec
from pipemega.config.sections.scheduler_section import DecayParams, RunLength, SchedulerSection
from pipemega.errors import ConfigError
from pipemega.optimizer import build_schedule, parameter_groups
from pipemega.optimizer.param_groups import check_specs

SHAPES = {
    "layers.0.weight": (2, 2), "layers.0.bias": (2,), "layers.1.norm.weight": (2,),
    "layers.2.weight": (2, 2),
}  # fmt: skip
NAMED = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def specs(*groups: dict[str, Any]) -> list[GroupSpec]:
    return [
        GroupSpec(f"groups[{i}]", group.pop("params"), group)
        for i, group in enumerate(map(dict, groups))
    ]


def grouped(*groups: dict[str, Any], decay: bool = True) -> list[tuple[list[str], dict[str, Any]]]:
    names = {id(p): name.removeprefix("layers.") for name, p in NAMED.items()}
    found = parameter_groups(NAMED.items(), specs(*groups), decay_norms_and_biases=decay)
    return [
        ([names[id(p)] for p in group["params"]], {k: v for k, v in group.items() if k != "params"})
        for group in found
    ]


def test_the_first_group_that_matches_gets_a_parameter_and_the_default_group_the_rest() -> None:
    assert grouped({"params": r"^layers\.0", "lr": 0.1}, {"params": "bias|norm", "eps": 1.0}) == [
        (["2.weight"], {}),
        (["0.weight", "0.bias"], {"lr": 0.1}),
        (["1.norm.weight"], {"eps": 1.0}),
    ]


def test_norms_and_biases_without_decay_follow_their_group_unless_it_sets_the_decay() -> None:
    groups = [{"params": r"^layers\.0", "lr": 0.1}, {"params": "norm", "weight_decay": 0.3}]
    assert grouped(*groups, decay=False) == [
        (["2.weight"], {}),
        ([], {"weight_decay": 0.0}),
        (["0.weight"], {"lr": 0.1}),
        (["0.bias"], {"lr": 0.1, "weight_decay": 0.0}),
        (["1.norm.weight"], {"weight_decay": 0.3}),
    ]


def test_a_group_without_parameters_in_the_whole_model_is_refused() -> None:
    check_specs(specs({"params": "bias"}, {"params": "weight"}), list(NAMED))
    with pytest.raises(ConfigError) as caught:
        check_specs(specs({"params": "bias"}, {"params": "nrom"}), list(NAMED))
    assert str(caught.value) == (
        "groups[1].params 'nrom' matches none of the 4 trainable parameters of the model: "
        "'layers.0.weight', 'layers.0.bias', 'layers.1.norm.weight' and 1 more"
    )
    assert caught.value.on_every_rank
    with pytest.raises(ConfigError) as caught:
        check_specs(specs({"params": "layers"}, {"params": "bias"}), list(NAMED))
    assert str(caught.value) == (
        "groups[1].params 'bias' matches only parameters that an earlier group has: "
        "groups[0].params 'layers' matches 'layers.0.bias'. The first matching group is used: "
        "reorder the groups, or remove one"
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"params": "bias"}, "optimizer.groups must be a list"),
        ([{"weight_decay": 0.0}], "optimizer.groups[0].params is missing: it is a regular expres"),
        ([{"params": 3}], "optimizer.groups[0].params must be text, not 3"),
        ([{"params": "a("}], "optimizer.groups[0].params 'a(' is not a regular expression: missing "
         "), unterminated subpattern at position 1"),
        ([{"params": "b"}, {"params": "a", "wight_decay": 0.0}],
         "groups[1] has the unknown option 'wight_decay'; did you mean 'weight_decay'?"),
        ([{"params": "a", "adam_w_mode": False}], "the unknown option 'adam_w_mode'; known: lr"),
        ([{"params": "a", "lr": -1}], "optimizer.groups[0].lr must be a number >= 0, not -1"),
        ([{"params": "a", "betas": [0.9]}], "optimizer.groups[0].betas must be [a number"),
        (["bias"], "optimizer.groups"),
    ],
)  # fmt: skip
def test_invalid_groups_of_the_config_are_refused_by_key(groups: Any, message: str) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "groups": groups}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(config)


def net() -> pipemega.PipelineModule:
    layers = [pipemega.LayerSpec(nn.Linear, 2, 2) for _ in range(2)]
    return pipemega.PipelineModule(layers, loss_fn=nn.functional.mse_loss)


def config(groups: Any, **params: Any) -> dict[str, Any]:
    section = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1, **params}}
    return {"train_batch_size": 2, "optimizer": {**section, "groups": groups}}


def test_the_groups_of_the_config_train_and_model_parameters_replaces_them() -> None:
    groups = [{"params": r"layers\.0", "lr": 0.0, "betas": [0.5, 0.9]}]
    engine, optimizer, *_ = pipemega.initialize(net(), config(groups))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.9)
    before = engine.parameter_state()
    engine.train_batch(iter([(torch.ones(2, 2), torch.zeros(2, 2))]))
    changed = {n for n, p in engine.parameter_state().items() if not torch.equal(p, before[n])}
    assert changed == {"layers.1.weight", "layers.1.bias"}
    own = [{"params": "bias", "weight_decay": 0.0}]
    _, optimizer, *_ = pipemega.initialize(net(), config(groups), model_parameters=own)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": "bias", "wight_decay": 0.0}],
         "model_parameters[0] has the unknown option 'wight_decay'; did you mean 'weight_decay'?"),
        ([{"params": "bias", "lr": "high"}], 'model_parameters[0].lr must be a number >= 0, not "'),
        ([{"params": "norm"}], "model_parameters[0].params 'norm' matches none of the 4 trainable"),
    ],
)  # fmt: skip
def test_model_parameters_are_checked_like_the_groups_of_the_config(
    groups: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        pipemega.initialize(net(), config([]), model_parameters=groups)
    assert caught.value.on_every_rank


def test_a_schedule_keeps_the_ratio_of_the_rates_of_the_groups() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [NAMED["layers.0.bias"]]}, {"params": [NAMED["layers.2.weight"]], "lr": 0.05}],
        lr=0.2,
    )
    section = SchedulerSection(type="linear", params=DecayParams(max_lr=1.0, min_lr=0.2))
    schedule = build_schedule(optimizer, section, RunLength(steps=4))
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr())
        schedule.end_step()
    assert [first for first, _ in rates] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert [second for _, second in rates] == pytest.approx([0.25, 0.2, 0.15, 0.1])
    optimizer = torch.optim.SGD([{"params": [NAMED["layers.0.bias"]], "lr": 0.05}], lr=0.0)
    with pytest.raises(ConfigError, match=r"has the learning rate 0.05, and the optimizer's is 0"):
        build_schedule(optimizer, section, RunLength(steps=4))
