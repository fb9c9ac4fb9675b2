"""Layers of a PipelineModule: what is refused, and methods of modules as layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipemega
from pipemega import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.pipeline.model.module import BuildOptions, build_stages


class Model(nn.Module):
    """A model of which the methods are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.act = nn.ReLU()
        self.width = 4

    def forward_body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward_head(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(x) * scale


MODEL = Model()


class Holder:
    """An object that is not a module and holds one."""

    def __init__(self) -> None:
        self.model, self.scale = MODEL, 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.model.head(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


def calls_global(x: Tensor) -> Tensor:
    return indirect(x)


def indirect(x: Tensor) -> Tensor:
    return next(MODEL.head(y) for y in (x,))


def with_default(x: Tensor, weight: Tensor = MODEL.head.weight) -> Tensor:
    return x @ weight.T


def enclosing() -> dict[str, Callable[[Any], Any]]:
    inner, weights, holder = nn.Linear(4, 4), [MODEL.body.weight], Holder()
    return {
        "inner (Linear)": lambda x: inner(x),
        "inner.weight (Parameter)": lambda x: x @ inner.weight.T,
        "weights (Parameter)": lambda x: x @ weights[0].T,
        "holder.model.head (Linear)": lambda x: holder.model.head(x),
        "MODEL.forward_head (Model)": lambda x: MODEL.forward_head(x, scale=2.0),
        "self.model.head (Linear)": holder,
        "MODEL.head (Linear)": calls_global,
        "a default argument (Parameter)": with_default,
        "an argument of partial (Linear)": partial(F.linear, weight=inner),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", enclosing())
def test_a_function_that_uses_a_trainable_module_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineModule([nn.Linear(4, 4), enclosing()[name]])
    assert str(caught.value).startswith("layers[1] (")
    assert f"is a function that uses {name}, whose parameters no layer contains" in str(
        caught.value
    )
    assert "write an nn.Module that contains it" in str(caught.value)
    assert caught.value.on_every_rank


def test_functions_without_trainable_modules_are_layers() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    holder = Holder()
    PipelineModule(
        [
            torch.tanh,
            partial(F.dropout, p=0.1),
            lambda x: MODEL.act(x) * MODEL.width,
            lambda x: frozen(x),
            holder.scaled,
            lambda x: F.gelu(x).head,  # an attribute with the name of a module
            Tensor.contiguous,
        ]
    )


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **changes,
    }


@pytest.mark.parametrize("keywords", [{}, {"scale": 2.0}])
def test_a_method_of_a_module_trains_the_parameters_of_the_module(keywords: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    before = model.head.weight.detach().clone()
    layer = partial(model.forward_head, **keywords) if keywords else model.forward_head
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4), layer], loss_fn=F.mse_loss)
    assert net.layer_names == ["Linear", "Model.forward_head"]
    engine, *_ = pipemega.initialize(net, config_of())
    x, y = torch.ones(2, 4), torch.zeros(2, 2)
    expected = model.forward_head(engine.module[0].layers["0"](x), **keywords)
    loss = engine.train_batch(iter([(x, y)]))
    assert loss == pytest.approx(F.mse_loss(expected, y).item())
    assert "layers.1.head.weight" in engine.parameter_state()
    assert not torch.equal(model.head.weight, before)


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([MODEL.forward_body, MODEL.forward_head],
         "layers 0 (Model.forward_body) and 1 (Model.forward_head) share the parameter"),
        ([MODEL.body, torch.tanh, MODEL.forward_head],
         "layers 0 (Linear) and 2 (Model.forward_head) share the parameter 'body.weight'"),
        ([SHARED, SHARED], "layers 0 (Linear) and 1 (Linear) share the parameter 'weight'"),
        ([LayerSpec(nn.Sequential, SHARED), LayerSpec(lambda: SHARED)],
         "layers 0 (Sequential) and 1 (<lambda>) share the parameter 'weight'"),
    ],
)  # fmt: skip
def test_a_parameter_in_two_layers_is_refused_with_the_advice_to_tie(
    layers: Any, words: str
) -> None:
    """Each stage trained its own copy, on some partitions only."""
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(PipelineModule(layers, loss_fn=F.mse_loss), config_of())
    assert words in str(caught.value)
    assert "write TiedLayerSpec(key, ...) at both positions" in str(caught.value)
    assert caught.value.on_every_rank


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.ReLU], "layers[0] is the class ReLU: write ReLU(...) for a built module, or "
                    "LayerSpec(ReLU, ...)"),
        (["Linear"], "layers[0] is 'Linear'; a layer is a LayerSpec, an nn.Module or a function"),
        ([nn.ReLU(), 3], "layers[1] is 3; a layer is"),
        ([None], "layers[0] is None; a layer is"),
        ([dict], "layers[0] is the class dict; a layer is"),
        ([[nn.ReLU()]], "layers[0] is of type list: write *layers to put its entries in the list"),
        ([torch.ones(2)], "layers[0] is of type Tensor; a layer is"),
        (nn.Linear(2, 2), "PipelineModule takes a list of layers, not of type Linear"),
        (nn.ReLU, "PipelineModule takes a list of layers, not the class ReLU"),
        ("Linear", "PipelineModule takes a list of layers, not 'Linear'"),
        (None, "PipelineModule takes a list of layers, not None"),
        (nn.ModuleDict(), "PipelineModule takes a list of layers, not of type ModuleDict"),
        ([], "a PipelineModule needs at least one layer"),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_a_layer_is_refused_with_its_position(layers: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineModule(layers)
    assert words in str(caught.value)
    assert caught.value.on_every_rank


def test_a_sequential_is_a_list_of_layers() -> None:
    net = PipelineModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert net.layer_names == ["Linear", "ReLU"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LayerSpec(nn.ReLU()),
         "LayerSpec takes the class of a layer and its arguments, not a built ReLU"),
        (lambda: LayerSpec("Linear"), "LayerSpec(nn.Linear, 16, 64), not 'Linear'"),
        (lambda: TiedLayerSpec("k", None), "TiedLayerSpec takes the class of a layer and its"),
        (lambda: LayerSpec(torch.tanh).build(None),
         "if tanh is itself the layer, put it in the list without LayerSpec"),
        (lambda: LayerSpec(dict).build(None), "built dict, which is not an nn.Module"),
        (lambda: PipelineModule(
            [TiedLayerSpec("k", nn.Linear, 4, 4, forward_fn=lambda m, x: MODEL.head(m(x)))]
        ), "layers[0] (Linear): its forward_fn is a function that uses MODEL.head (Linear)"),
    ],
)  # fmt: skip
def test_a_layer_spec_of_something_else_is_refused(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss, "loss_fn is the class CrossEntropyLoss: write "
                              "loss_fn=CrossEntropyLoss()"),
        ("mse", "loss_fn is 'mse', which cannot be called: give a function of (output, labels)"),
        (nn.Linear(2, 2), "loss_fn has trainable parameters (Linear), which no stage would train"),
        (lambda y, t: MODEL.head(y).sum(), "loss_fn has trainable parameters (Linear), which no"),
        (LayerSpec(nn.Linear, 2, 2), "loss_fn has trainable parameters (Linear), which no stage"),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_be_called_or_trained_is_refused(loss_fn: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(PipelineModule([nn.Linear(2, 2)], loss_fn=loss_fn), config_of())
    assert words in str(caught.value)
    assert caught.value.on_every_rank


def test_a_tied_name_that_is_no_parameter_is_refused_with_the_names_and_the_way_out():
    """DeepSpeed takes a property here."""
    ties = [TiedLayerSpec("k", nn.Linear, 4, 4, tied_weight_attr="table") for _ in range(2)]
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(PipelineModule(ties, loss_fn=F.mse_loss), config_of())
    assert "has no parameter 'table'; it has: weight, bias" in str(caught.value)
    assert "pipemega.compat.deepspeed.pipe.TiedLayerSpec also takes a property" in str(caught.value)


def test_tied_layers_of_each_stage_of_a_rank_share_one_parameter_and_its_gradient():
    net = PipelineModule([TiedLayerSpec("k", nn.Linear, 4, 4, bias=False) for _ in range(4)])
    options = BuildOptions(Axis("tensor"), torch.device("cpu"), 1)
    stages = build_stages(net, [0, 2, 4], [0, 1], options)
    first, second, third, fourth = (
        layer.get_parameter("weight")
        for stage in stages.values()
        for layer in stage.layers.values()
    )
    assert first is second
    assert third is fourth
    assert third is not first
    assert third.data_ptr() == first.data_ptr()
    x = torch.ones(1, 4)
    for layer in stages[1].layers.values():
        x = layer(x)
    x.sum().backward()
    weight = first.detach().clone().requires_grad_()
    (torch.ones(1, 4) @ weight.T @ weight.T).sum().backward()
    assert third.grad is not None
    torch.testing.assert_close(third.grad, weight.grad)
