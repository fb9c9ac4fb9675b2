"""Wrong arguments of `initialize` are refused by name, with what to write instead."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.errors import ConfigError

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
LINEAR = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(LINEAR.parameters(), lr=0.1)


def net() -> PipelineModule:
    return PipelineModule([LayerSpec(nn.Linear, 2, 2)], loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            LINEAR,
            "not the nn.Module Linear: write PipelineModule([layer, layer, ...]",
        ),
        (nn.Sequential(LINEAR), "not an nn.Sequential: write PipelineModule(model, loss_fn=...)"),
        ([LINEAR], "not a list: write PipelineModule(layers, loss_fn=...)"),
        (LayerSpec(nn.Linear, 2, 2), "not a LayerSpec"),
        (PipelineModule, "not the class PipelineModule: write PipelineModule([layer, ...]"),
        (None, "not None"),
        ("gpt", "not 'gpt'"),
    ],
)
def test_a_model_that_is_no_pipeline_module_is_refused(model: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(model, CONFIG)
    assert f"initialize() takes a PipelineModule as model, {words}" in str(caught.value)
    assert caught.value.on_every_rank


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": OPTIMIZER}, "optimizer is the SGD itself: the engine's optimizer updates "
         "master weights and shards of this rank, so it is built from them: write optimizer=lambda "
         "params: SGD(params, lr=0.1), or set the config section 'optimizer'"),
        ({"optimizer": "Lion"}, "optimizer must be a function of parameter groups, not 'Lion'"),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 2)},
         "lr_scheduler is the StepLR itself, which is over another optimizer than the engine's: "
         "write lr_scheduler=lambda optimizer: StepLR(optimizer, ...)"),
        ({"lr_scheduler": 0.1}, "lr_scheduler must be a function of the optimizer, not 0.1"),
        ({"model_parameters": LINEAR.parameters()},
         'model_parameters must be a list of groups such as {"params": "norm|bias", '
         '"weight_decay": 0.0}, not a generator. The engine trains all parameters that require a '
         "gradient: set requires_grad to False"),
        ({"model_parameters": list(LINEAR.parameters())},
         "model_parameters[0] must be a group such as"),
        ({"model_parameters": [{"params": list(LINEAR.parameters())}]},
         "model_parameters[0].params must be text, not"),
        ({"args": SimpleNamespace()}, "'args': pass the path of the JSON file as config"),
        ({"training_dataset": []}, "'training_dataset'; did you mean 'training_data'?"),
        ({"training_data": OPTIMIZER}, "training_data is the optimizer SGD: the engine's "
         "optimizer updates"),
        ({"config": SimpleNamespace(train_batch_size=2)},
         "a config is a path, a mapping or a Config, not SimpleNamespace"),
        ({"config": None}, "a config is a path, a mapping or a Config, not NoneType"),
    ],
)  # fmt: skip
def test_an_argument_that_initialize_does_not_take_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(**({"model": net(), "config": CONFIG} | arguments))
    assert words in str(caught.value)
    assert caught.value.on_every_rank


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("num_stages", ": set mesh.pipeline in the config"),
        ("partition_method", ": set pipeline.partition in the config"),
        ("loss_func", "; did you mean 'loss_fn'?"),
    ],
)
def test_an_argument_of_deepspeeds_pipeline_module_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineModule([LINEAR], **{argument: 2})
    assert str(caught.value) == f"PipelineModule() has no argument {argument!r}{words}"
    assert caught.value.on_every_rank


def test_training_without_a_loss_is_refused_before_the_step() -> None:
    engine, *_ = pipemega.initialize(PipelineModule([nn.Linear(2, 2)]), CONFIG)
    with pytest.raises(ConfigError) as caught:
        engine.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))]))
    assert "train_batch needs a loss: give PipelineModule(layers, loss_fn=...)" in str(caught.value)
    assert caught.value.on_every_rank
