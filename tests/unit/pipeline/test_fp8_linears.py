"""Which linears run in fp8, what is refused, and the calls of torchao; without torchao."""

import copy
import enum
import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.config import load
from pipemega.config.sections.precision_sections import Fp8Section
from pipemega.config.sections.run_sections import LoraSection
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError
from pipemega.lora.low_rank import add_adapter
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.model.compiled_layers import _Target
from pipemega.pipeline.model.fp8_linears import enable_fp8, load_fp8, log_fp8
from pipemega.pipeline.model.module import BuildOptions, Stage, build_stages
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pipemega.tensor_parallel.layers import LinearProducts

WHOLE = Axis("tensor")
CONFIG: dict[str, Any] = {
    "train_batch_size": 1,
    "bf16": {"enabled": True},
    "fp8": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "mesh": {"device": "cpu"},
}
CUDA = torch.device("cuda", 0)


def section(recipe: str = "tensorwise") -> Fp8Section:
    return Fp8Section.model_validate({"enabled": True, "recipe": recipe})


@pytest.mark.parametrize(("other", "dtype"), [({}, "fp32"), ({"fp16": {"enabled": True}}, "fp16")])
def test_fp8_without_bf16_is_refused(other: dict[str, Any], dtype: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 1, "fp8": {"enabled": True}, **other})
    assert str(caught.value) == (
        f"fp8.enabled is true, and the run computes in {dtype}: the fp8 products take bf16 "
        "tensors; set bf16.enabled to true, or fp8.enabled to false"
    )


def test_fp8_on_a_cpu_is_refused_before_the_stages_are_built() -> None:
    net = PipelineModule([LayerSpec(nn.Linear, 16, 16)], nn.functional.mse_loss)
    with pytest.raises(ConfigError) as caught:
        pipemega.initialize(net, CONFIG)
    assert str(caught.value) == (
        "fp8.recipe 'tensorwise' needs a CUDA GPU with compute capability 8.9 or newer, and this "
        "rank runs on 'cpu': set fp8.enabled to false, which trains in bf16"
    )
    assert caught.value.on_every_rank


def test_a_run_without_an_optimizer_ignores_fp8() -> None:
    net = PipelineModule([LayerSpec(nn.Linear, 16, 16)], nn.functional.mse_loss)
    engine, *_ = pipemega.initialize(net, {k: v for k, v in CONFIG.items() if k != "optimizer"})
    assert "product" not in vars(next(iter(engine.module.modules())))


@pytest.mark.parametrize(
    ("recipe", "capability", "message"),
    [
        (
            "tensorwise",
            (8, 0),
            "fp8.recipe 'tensorwise' needs a CUDA GPU with compute capability 8.9 or newer, and "
            "NVIDIA X has 8.0: set fp8.enabled to false, which trains in bf16",
        ),
        (
            "rowwise",
            (8, 9),
            "fp8.recipe 'rowwise' needs a CUDA GPU with compute capability 9.0 or newer, and "
            "NVIDIA X has 8.9: use fp8.recipe 'tensorwise', or set fp8.enabled to false, which "
            "trains in bf16",
        ),
    ],
)
def test_an_older_gpu_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    with pytest.raises(ConfigError) as caught:
        load_fp8(section(recipe), CUDA)
    assert str(caught.value) == message


@pytest.mark.parametrize("found", [None, ModuleType("torchao.float8")])
def test_a_missing_or_another_torchao_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, found: ModuleType | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("torchao", "torchao.float8", "torchao.float8.float8_linear"):
        monkeypatch.setitem(sys.modules, name, found)
    with pytest.raises(ConfigError) as caught:
        load_fp8(section(), CUDA)
    message = str(caught.value)
    assert message.startswith("fp8.enabled is true, and torchao's float8 cannot be used here (")
    assert message.endswith(
        "): pip install -e '.[fp8]', or set fp8.enabled to false, which trains in bf16"
    )


class Scaling(enum.Enum):
    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class Role(enum.Enum):
    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


@dataclass(frozen=True)
class Cast:
    scaling_type: Scaling
    target_dtype: str
    scaling_granularity: str = "tensorwise"


@dataclass(frozen=True)
class Recipe:
    cast_config_input: Cast
    cast_config_weight: Cast
    cast_config_grad_output: Cast
    cast_config_weight_for_grad_input: Cast
    cast_config_input_for_grad_weight: Cast
    cast_config_grad_output_for_grad_weight: Cast
    emulate: bool = False
    pad_inner_dim: bool = False
    round_scales_to_power_of_2: bool = False

    @staticmethod
    def from_recipe_name(name: str) -> "Recipe":
        e4m3, e5m2 = Cast(Scaling.DYNAMIC, "e4m3"), Cast(Scaling.DYNAMIC, "e5m2")
        off = Cast(Scaling.DISABLED, "e4m3")
        if name == "rowwise_with_gw_hp":
            return Recipe(e4m3, e4m3, e4m3, e4m3, off, off)
        return Recipe(e4m3, e4m3, e5m2, e4m3, e4m3, e5m2)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace torchao by functions that record each cast and keep its tensor."""
    found: list[tuple[Any, ...]] = []

    def cast(tensor: Tensor, dtype: str, mm: Recipe, **options: Any) -> Tensor:
        assert not mm.emulate
        role, dim = options["gemm_input_role"], options["axiswise_dim"]
        found.append((role.value, tuple(tensor.shape), dtype, dim, mm.pad_inner_dim))
        return tensor

    def convert(net: nn.Sequential, *, config: Recipe) -> list[Any]:
        assert type(net[0]) is nn.Linear
        return [SimpleNamespace(linear_mm_config=config)]

    float8, linear = ModuleType("torchao.float8"), ModuleType("torchao.float8.float8_linear")
    vars(float8).update(Float8LinearConfig=Recipe, convert_to_float8_training=convert)
    vars(linear).update(
        GemmInputRole=Role,
        hp_tensor_to_float8_dynamic=cast,
        get_maybe_axiswise_dim=lambda dim, granularity: dim,
        matmul_with_hp_or_float8_args=None,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (ModuleType("torchao"), float8, linear):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_torchao_casts_the_operands_of_each_product_and_pads_the_rows(
    casts: list[tuple[Any, ...]],
) -> None:
    """The numbers of rows is the inner dim of dW, and of no other product."""
    products = load_fp8(section(), CUDA)
    x, weight = torch.randn(10, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    y = products(x, weight)
    y.backward(dy := torch.randn_like(y))
    assert casts == [
        ("input", (10, 16), "e4m3", -1, False),
        ("weight", (16, 32), "e4m3", 0, False),
        ("grad_output", (10, 32), "e5m2", -1, False),
        ("weight", (16, 32), "e4m3", -1, False),
        ("grad_output", (10, 32), "e5m2", 0, True),
        ("input", (10, 16), "e4m3", 0, True),
    ]
    assert torch.equal(y, x.mm(weight.t()))
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, dy.mm(weight))
    assert torch.equal(weight.grad, dy.t().mm(x))


def test_a_product_that_is_not_needed_is_not_computed(casts: list[tuple[Any, ...]]) -> None:
    products, x = load_fp8(section(), CUDA), torch.randn(16, 16, requires_grad=True)
    products(x, torch.randn(16, 16)).sum().backward()
    assert [role for role, *_ in casts] == ["input", "weight", "grad_output", "weight"]
    casts.clear()
    products(x.detach(), torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert [role for role, *_ in casts] == ["input", "weight", "grad_output", "input"]


def test_weight_gradients_in_bf16_are_not_cast(casts: list[tuple[Any, ...]]) -> None:
    products = load_fp8(section("rowwise_with_gw_hp"), CUDA)
    x, dy = torch.randn(10, 16), torch.randn(10, 32)
    assert torch.equal(products.weight_gradient(x, dy), dy.t().mm(x))
    assert casts == []


class Router(nn.Linear):
    """A subclass may compute something else."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, axis=WHOLE)
        self.down = RowParallelLinear(32, 16, axis=WHOLE)
        self.own, self.odd = nn.Linear(16, 16), nn.Linear(16, 24)
        self.gate, self.other = nn.Linear(16, 16), Router(16, 16)
        self.wide = nn.Linear(16, 16, dtype=torch.float32)
        self.adapted = RowParallelLinear(16, 16, axis=WHOLE)
        add_adapter(self.adapted, LoraSection(r=16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x))) + self.own(x) + self.odd(x).mean(-1, keepdim=True)
        return x * torch.sigmoid(self.gate(x)) + self.other(x) + self.adapted(x)


def stages_of(*layers: Any, dtype: torch.dtype) -> tuple[PipelineModule, dict[int, Stage]]:
    net = PipelineModule([*layers], nn.functional.mse_loss)
    options = BuildOptions(WHOLE, torch.device("cpu"), 1)
    stages = dict(build_stages(net, [0, len(layers)], [0], options))
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if "wide" not in name:
                parameter.data = parameter.data.to(dtype)
    return net, stages


def test_the_linears_of_blocks_run_in_fp8_and_the_log_names_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tied = TiedLayerSpec("matrix", nn.Linear, 16, 16)
    layers = (LayerSpec(Block), tied, tied, LayerSpec(nn.Linear, 16, 16))
    net, stages = stages_of(*layers, dtype=torch.bfloat16)
    names = [*stages[0].state_dict()]
    products = LinearProducts()
    counts = enable_fp8(net, stages, products)
    in_fp8 = ("up", "down", "own", "adapted")
    (block,) = (layer for layer in stages[0].modules() if isinstance(layer, Block))
    for name, module in block.named_children():
        product = vars(module).get("product")
        assert (getattr(product, "base", product) is products) == (name in in_fp8), name
    assert [*stages[0].state_dict()] == names
    with caplog.at_level(logging.INFO):
        log_fp8(counts, "rowwise", Mesh.single(), logging.getLogger())
    assert caplog.messages == [
        "fp8.recipe 'rowwise': 4 of 12 linears run in fp8; not in fp8: embeddings, "
        "vocabulary-parallel heads, attention, 2 (adapter), 1 (output head), 1 (router), "
        "1 (size not a multiple of 16), 2 (tied weight), 1 (weight is not a bf16 parameter)"
    ]


def test_a_model_without_such_linears_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    net, stages = stages_of(LayerSpec(nn.Linear, 16, 16), dtype=torch.bfloat16)
    counts = enable_fp8(net, stages, LinearProducts())
    log_fp8(counts, "rowwise", Mesh.single(), logging.getLogger())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("fp8.recipe 'rowwise': 0 of 1 linears run in fp8")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, axis=WHOLE)
        self.down = RowParallelLinear(32, 16, axis=WHOLE)
        self.own = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + self.own(x)


class Counted(LinearProducts):
    """torch's products, counted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("y")
        return super().output(x, weight)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("dx")
        return super().input_gradient(dy, weight)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        self.calls.append("dw")
        return super().weight_gradient(x, dy)


def test_i_and_w_compute_their_products_and_an_engine_without_fp8_has_the_first_layers() -> None:
    net, stages = stages_of(LayerSpec(Small), nn.Identity(), dtype=torch.bfloat16)
    (stage,) = stages.values()
    generator = torch.Generator().manual_seed(1)
    for parameter in stage.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    entering = torch.randn(2, 3, 16, generator=generator).bfloat16()
    layers = [*stage.layers.values()]
    buffer = GradientBuffer([*stage.named_parameters()], dtype=torch.float32)

    def gradients(queue: WeightGradQueue | None) -> list[Tensor]:
        buffer.zero()
        x = entering.clone().requires_grad_()
        with nullcontext() if queue is None else queue.defer(0):
            layers[0](x).float().square().sum().backward()
        if queue is not None:
            products.calls.append("|")
            queue.run(0)
        assert x.grad is not None
        return [x.grad, *(buffer.view(p).clone() for p in stage.parameters())]

    products = Counted()
    plain = gradients(None)
    before = [dict(vars(module)) for module in stage.modules()]
    assert enable_fp8(net, stages, products)[""] == 3
    whole = gradients(None)
    assert sorted(products.calls) == ["dw"] * 3 + ["dx"] * 3 + ["y"] * 3
    products.calls.clear()
    queue = WeightGradQueue(buffer)
    enable_split_backward([stage], queue)
    split = gradients(queue)
    assert sorted(products.calls[:6]) == ["dx"] * 3 + ["y"] * 3
    assert products.calls[6:] == ["|", "dw", "dw", "dw"]
    for one, two, three in zip(plain, whole, split, strict=True):
        assert torch.equal(two, three)
        # The bias is added after a rounding to bf16, as in torchao.
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.03 * float(one.abs().max()))
    # A copy of the layer has the same products: they have no state, and may hold a module.
    assert copy.deepcopy(products) is products
    # Gradients in bf16, to which torch's product of bf16 tensors could add.
    buffer = GradientBuffer([*stage.named_parameters()], dtype=torch.bfloat16)
    queue = WeightGradQueue(buffer, fuses=True)
    enable_split_backward([stage], queue)
    products.calls.clear()
    gradients(queue)
    assert products.calls[7:] == ["dw"] * 3
    linear = next(m for m in stage.modules() if type(m) is nn.Linear)
    _Target(queue, linear, products).add(entering[0], entering[0])
    assert products.calls[7:] == ["dw"] * 4
    # The user's modules in a second engine.
    enable_fp8(net, stages, None)
    assert [dict(vars(module)) for module in stage.modules()] == before
