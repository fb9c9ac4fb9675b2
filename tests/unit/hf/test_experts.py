"""Experts of transformers on several expert ranks: what is refused, and a choice that changes."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipelineError
from pipemega.parameters import shard_of
from pipemega.pipeline.model.recompute import recompute
from tests.ranks.hf import tiny_models


def layer_of(config: Any, ranks: int, rank: int = 0) -> nn.Module:
    """Return the first layer, without values, as a rank of the expert axis has it."""
    net = pipemega.from_pretrained(config, pretrained=False)
    expert = Axis("expert", tuple(range(ranks)), rank)
    return net.specs[1].on_expert_axis(expert).build(Axis("tensor"), "meta")


def test_a_rank_has_rows_of_all_parameters_of_the_experts() -> None:
    layer = layer_of(tiny_models.config_of("gpt-oss"), 2, rank=1)
    experts = layer.get_submodule("mlp.experts")
    assert experts.num_experts == 4
    for parameter in experts.parameters():
        assert parameter.shape[0] == 2
        assert shard_of(parameter).rows == (2, 4)
        assert shard_of(parameter).shape[0] == 4
    assert not shard_of(layer.get_parameter("mlp.router.weight")).is_expert


def test_a_number_of_experts_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mixtral has 4 experts.*mesh.expert \(3\).*a divisor"):
        layer_of(tiny_models.config_of("mixtral"), 3)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh.expert is 2, .*'llama'.*it has no experts.* to 1"):
        layer_of(tiny_models.config_of("llama"), 2)


def test_a_family_without_a_plan_for_its_experts_is_refused() -> None:
    config = tiny_models.config_of("mixtral")
    config.base_model_ep_plan = None
    with pytest.raises(ConfigError, match=r"mesh.expert is 2.*no plan to divide its experts"):
        layer_of(config, 2)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("deepseek-v2", {}, r"for the routers of mixtral.*family 'deepseek_v2': set them to 0"),
        ("mixtral", {"task": "sequence-classification"}, "need a loss of tokens"),
        ("mixtral", {"loss_fn": nn.CrossEntropyLoss()}, r"leave loss_fn out, or set them to 0"),
    ],
)
def test_auxiliary_losses_that_would_be_wrong_are_refused(
    family: str, options: dict[str, Any], message: str
) -> None:
    config = tiny_models.config_of(family)
    with pytest.raises(ConfigError, match=message):
        pipemega.from_pretrained(config, pretrained=False, moe_aux_loss_coeff=0.1, **options)


def test_a_recomputation_that_chooses_other_experts_is_an_error() -> None:
    """Its gradients would belong to other experts than those of the forward."""
    net = pipemega.from_pretrained(tiny_models.config_of("mixtral"), pretrained=False)
    experts = net.specs[1].build(Axis("tensor"), "cpu").get_submodule("mlp.experts")
    hidden = torch.randn(5, 32, requires_grad=True)
    calls = []

    def region(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        index = torch.tensor([[0, 1]] * 4 + [[2, len(calls)]])
        output: torch.Tensor = experts(hidden, index, torch.ones(5, 2))
        return output

    output = recompute(region, hidden)
    with pytest.raises(PipelineError, match=r"MixtralExperts: .* for 1 of 5 tokens.*deterministic"):
        output.sum().backward()


def test_the_loss_of_transformers_names_the_one_of_pipemega() -> None:
    config = transformers.MixtralConfig(output_router_logits=True)
    with pytest.raises(ConfigError, match=r"all layers.*model.moe_aux_loss_coeff"):
        pipemega.from_pretrained(config, pretrained=False)
