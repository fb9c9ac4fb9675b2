"""Adapters of linears: their gradients, what is frozen, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.config import load
from pipemega.config.sections.run_sections import LoraSection
from pipemega.distributed.mesh import Axis
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.lora.adapters import add_lora, merged
from pipemega.lora.low_rank import add_adapter
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.ranks.training_runs import VOCAB, data, settings

WHOLE = Axis("tensor")
LINEARS = {
    "nn.Linear": lambda: nn.Linear(6, 4),
    "column-parallel": lambda: ColumnParallelLinear(6, 4, axis=WHOLE),
    "row-parallel": lambda: RowParallelLinear(6, 4, axis=WHOLE),
}


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 2).mean()


def linear_with_adapter(kind: str, section: LoraSection) -> Any:
    linear: Any = LINEARS[kind]()
    linear.requires_grad_(False)
    add_adapter(linear, section)
    for parameter in (linear.weight, linear.lora_A.weight, linear.lora_B.weight):
        nn.init.normal_(parameter)
    return linear


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_output_and_gradients_are_those_of_the_merged_weight(
    kind: str, rslora: bool, split: bool
) -> None:
    torch.manual_seed(0)
    section = LoraSection(r=3, alpha=5.0, rslora=rslora)
    linear = linear_with_adapter(kind, section).double()
    a, b = linear.lora_A.weight, linear.lora_B.weight
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 5, 4, dtype=torch.float64)
    names = {"lora_A.weight": a, "lora_B.weight": b}
    whole = merged("weight", linear.weight, None, section.scale, names, lambda n, _: names[n])
    scale = 5 / 3**0.5 if rslora else 5 / 3
    torch.testing.assert_close(whole, linear.weight + scale * b @ a)
    wanted = nn.functional.linear(x, linear.weight + scale * b @ a, linear.bias)
    want = torch.autograd.grad(wanted, (x, a, b), dy)
    if split:
        enable_split_backward([linear], WeightGradQueue(_AddToGrad()))
    output = linear(x)
    output.backward(dy)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    for parameter, gradient in zip((x, a, b), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    assert linear.weight.grad is None


class _AddToGrad:
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def gpt_engine(**changes: Any) -> Engine:
    config = load(settings(**changes))
    engine, *_ = initialize(gpt(GPTConfig.of(config, VOCAB)), config)
    return engine


def test_the_model_starts_as_without_adapters_and_only_they_change() -> None:
    plain, adapted = gpt_engine(), gpt_engine(lora={"r": 2})
    before = {name: p.clone() for name, p in adapted.parameter_state().items()}
    for name, parameter in plain.parameter_state().items():
        assert torch.equal(before[name], parameter), name
    for step in range(2):
        adapted.train_batch(data(adapted, step))
    after = adapted.parameter_state()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 3 * 4 * 2


def test_recomputed_blocks_draw_the_same_dropout_of_adapters() -> None:
    norms = []
    for recompute in ("none", "full"):
        model = {"hidden_dropout": 0.0, "recompute": recompute}
        engine = gpt_engine(model=model, lora={"r": 2, "dropout": 0.5})
        engine.train_batch(data(engine, 0))
        assert engine.last_step is not None
        norms.append(engine.last_step.grad_norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_frozen_parameters_have_no_gradients_masters_or_optimizer_state(schedule: str) -> None:
    engine = gpt_engine(
        lora={"r": 2}, bf16={"enabled": True}, pipeline={"schedule": schedule}, scheduler=None
    )
    engine.train_batch(data(engine, 0))
    assert engine.steps.optimizer_step is not None
    masters = engine.steps.optimizer_step.masters
    trained = {n: p for n, p in engine.steps.model.parameters.items() if p.requires_grad}
    assert set(masters.named) == {slot.name for slot in masters.gradients.slots} == set(trained)
    assert all(".lora_" in name for name in trained)
    assert all(p.grad is None for n, p in engine.steps.model.parameters.items() if n not in trained)
    assert len(engine.steps.optimizer_step.optimizer.state) == len(trained)
    frozen = engine.steps.model.parameters["layers.2.attention.qkv.weight"]
    assert frozen.dtype == torch.bfloat16


def test_a_layer_that_is_trained_completely_stays_tied() -> None:
    engine = gpt_engine(lora={"r": 2, "targets": ["mlp.up"], "train_also": ["layers.0"]})
    before = {name: p.clone() for name, p in engine.parameter_state().items()}
    engine.train_batch(data(engine, 0))
    after = engine.parameter_state()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    ups = {f"layers.{position}.mlp.up.lora_B.weight" for position in (2, 3, 4)}
    # A does not change in the first step, because B is 0: only its weight decay does.
    assert {name for name in changed if "lora_A" not in name} == ups | {"layers.0.weight"}


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x, x, x)[0]
        return y


def small_model() -> PipelineModule:
    return PipelineModule(
        [
            TiedLayerSpec("both", nn.Linear, 4, 4),
            LayerSpec(nn.Sequential, nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)),
            LayerSpec(Attention, 4, 2),
            LayerSpec(nn.LayerNorm, 4),
            TiedLayerSpec("both", nn.Linear, 4, 4),
        ],
        squares,
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"targets": ["q_proj"]},
            "lora.targets: 'q_proj' matches no layer of the model; known: layers.0, layers.1.0",
        ),
        ({"targets": ["1.0", "1.3"]}, "lora.targets: '1.3' matches no layer"),
        ({"targets": r"layers\.7\..*"}, r"'layers\\.7\\..*' matches no layer"),
        (
            {"targets": ["layers.3"]},
            "lora.targets matches 'layers.3', which is a LayerNorm: an adapter needs a linear "
            "layer; to train this layer completely, name it in lora.train_also",
        ),
        (
            {"targets": ["out_proj"]},
            "'layers.2.out_proj', which is a NonDynamicallyQuantizableLinear",
        ),
        (
            {"targets": ["layers.4"]},
            "lora.targets matches 'layers.4', whose weight is tied by the key 'both': its copies "
            "would get different adapters; leave it out of lora.targets",
        ),
        (
            {"r": 5, "targets": ["1.0"]},
            "lora.r (5) is larger than a dimension of 'layers.1.0' (6 x 4): use lora.r <= 4, or "
            "leave this layer out of lora.targets",
        ),
        (
            {"targets": ["1.0"], "train_also": ["score"]},
            "lora.train_also: 'score' matches no layer of the model",
        ),
        (
            {"targets": ["1.0"], "train_also": ["layers.1"]},
            "lora.train_also trains all layers of lora.targets completely ('layers.1.0' ...), so "
            "none gets an adapter: leave them out of lora.train_also, or train without LoRA",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(section: dict[str, Any], message: str) -> None:
    arguments = {"r": 2, **section}
    if isinstance(arguments["targets"], list):
        arguments["targets"] = tuple(arguments["targets"])
    arguments["train_also"] = tuple(arguments.get("train_also", ()))
    with pytest.raises(ConfigError) as error:
        add_lora(small_model(), LoraSection(**arguments))
    assert message in str(error.value)
    assert error.value.on_every_rank


def test_a_model_without_linears_is_refused() -> None:
    net = PipelineModule([LayerSpec(nn.LayerNorm, 4)], squares)
    with pytest.raises(ConfigError, match="LoRA has nothing to train"):
        add_lora(net, LoraSection())


def test_an_empty_list_of_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora.targets is an empty list: name the layers"):
        load({"train_batch_size": 1, "lora": {"targets": []}})


def test_modules_that_the_user_has_built_get_adapters_too() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    net = PipelineModule([first, torch.tanh, last], squares)
    engine, *_ = initialize(
        net,
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "lora": {"r": 2, "targets": ["layers.0"]},
        },
    )
    weight = last.weight.clone()
    batch = torch.randn(2, 4), torch.randn(2, 4)
    engine.train_batch(iter([batch]))
    assert set(dict(first.named_parameters())) == {
        "weight", "bias", "lora_A.weight", "lora_B.weight",
    }  # fmt: skip
    assert first.lora_B.weight.abs().max() > 0  # type: ignore[union-attr]
    assert torch.equal(last.weight, weight)


@pytest.mark.parametrize("module", [lambda: nn.Linear(4, 4), nn.Linear(4, 4)])
def test_a_traced_module_is_refused(module: Any) -> None:
    """The names of its layers ended in an IndexError."""
    net = PipelineModule.from_module(module, loss_fn=squares)
    with pytest.raises(ConfigError, match=r"lora: the layers of PipelineModule\.from_module"):
        add_lora(net, LoraSection())
