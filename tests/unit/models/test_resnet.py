"""The ResNet: torchvision's names and values, the section of the config."""

from typing import Any

import pytest
import torch
from torch import nn

from pipemega import build_mesh, build_model, initialize, load_config, module_state_dict
from pipemega.config.sections.image_model_sections import BLOCKS
from pipemega.errors import ConfigError
from pipemega.models.resnet import ResNet, resnet_from_torchvision
from tests.optional_packages import imported
from tests.torch_resnet import TorchResNet


def config(**model: Any) -> Any:
    section = {"type": "resnet", "depth": 18, "width": 4, "num_classes": 6, "image_size": 32}
    return load_config(
        {
            "train_batch_size": 2,
            "model": section | model,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
    )


def assert_equal_to(module: nn.Module, **model: Any) -> None:
    """Give the weights of a torch module to the ResNet; compare outputs and the state again."""
    loaded = config(**model)
    mesh = build_mesh(loaded)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    state = module.state_dict()
    net = resnet_from_torchvision(build_model(loaded, mesh), state)
    engine, *_ = initialize(net, loaded, mesh=mesh)
    back = module_state_dict(net, engine)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())
    x = torch.randn(2, 3, 32, 32)
    (stage,) = engine.module
    with torch.no_grad():
        torch.testing.assert_close(stage.eval()(x), module.eval()(x))


@pytest.mark.parametrize(("depth", "stem"), [(18, "imagenet"), (50, "cifar")])
def test_weights_of_a_torch_module_give_its_outputs_and_return(depth: int, stem: str) -> None:
    module = TorchResNet(BLOCKS[depth], 4, 6, bottleneck=depth >= 50, cifar=stem == "cifar")
    assert_equal_to(module, depth=depth, stem=stem)


@pytest.mark.parametrize("depth", BLOCKS)
def test_weights_of_torchvision_give_its_outputs_and_return(depth: int) -> None:
    models = imported("torchvision.models")
    module = getattr(models, f"resnet{depth}")(num_classes=6)
    assert_equal_to(module, depth=depth, width=64)


def test_a_head_for_other_classes_is_new() -> None:
    module = TorchResNet(BLOCKS[18], 4, 9, bottleneck=False, cifar=False)
    loaded = config()
    net: Any = build_model(loaded, build_mesh(loaded))
    with pytest.raises(ConfigError, match=r"fc.weight has the shape \[9, 32\], and \[6, 32\]"):
        resnet_from_torchvision(net, module.state_dict())
    net = resnet_from_torchvision(net, module.state_dict(), new_head=True)
    engine, *_ = initialize(net, loaded)
    state = module_state_dict(net, engine)
    assert state["fc.weight"].shape == (6, 32)
    assert torch.equal(state["conv1.weight"], module.conv1.weight)


def test_a_residual_block_may_start_as_the_identity() -> None:
    loaded = config(zero_init_residual=True)
    net = build_model(loaded, build_mesh(loaded))
    engine, *_ = initialize(net, loaded)
    state = module_state_dict(net, engine)
    zeros = [name for name, value in state.items() if "weight" in name and not value.any()]
    assert zeros == [f"layer{s}.{b}.bn2.weight" for s in (1, 2, 3, 4) for b in (0, 1)]


def test_messages_between_stages_have_the_declared_shapes() -> None:
    loaded = config(image_size=40)
    net = build_model(loaded, build_mesh(loaded))
    assert isinstance(net, ResNet)
    assert net.boundary(1).shape == (2, 4, 10, 10)
    assert net.boundary(9).shape == (2, 32, 2, 2)


def test_joined_statistics_need_deferred_ones() -> None:
    with pytest.raises(ConfigError, match=r"model.sync .* and model.batch_norm is 'plain'"):
        config(sync=True)
