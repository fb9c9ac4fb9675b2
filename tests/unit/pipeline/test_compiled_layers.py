"""Compiled layers train like uncompiled ones; what cannot be compiled runs uncompiled."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.config.sections.pipeline_sections import CompileSection
from pipemega.distributed.mesh import Axis
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, PipelineError
from pipemega.pipeline.model import compiled_layers
from pipemega.pipeline.model.compiled_layers import trace_deferred_gradients
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.weight_queue import WeightGradQueue
from pipemega.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.ranks.training_runs import settings, train

COMPILED = {"enabled": True, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_equal_runs(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
    assert set(got["parameters"]) == set(want["parameters"])
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        for name, value in theirs.items():
            numpy.testing.assert_allclose(mine[name], value, rtol=1e-10, atol=1e-14)


def test_equal_layers_are_compiled_once_and_train_like_uncompiled_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    want = train(settings(), steps=2)
    with caplog.at_level(logging.INFO, "pipemega"):
        got = train(settings(compile=COMPILED), steps=2)
    assert_equal_runs(got, want)
    # Positions, three blocks and the norm; the lookup and the head are not compiled.
    assert graphs() == 3
    assert counters["graph_break"] == {}
    lines = [line for line in caplog.messages if line.startswith("compil")]
    assert lines[2] == "compiling Block (layers.2); the first step waits for it"
    assert lines[3].startswith("compiled Block (layers.2) in ")
    assert lines[3].endswith(" s, for 3 equal layers")
    assert len(lines) == 6


@pytest.mark.sweep
def test_blocks_of_many_engines_in_one_process_are_all_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A method that `forward` calls is a frame of its own if a graph breaks in it, as at dropout.

    Its graphs count for all engines: after eight of them the blocks ran uncompiled.
    """
    found = []
    for _ in range(10):
        counters.clear()
        model = {"num_layers": 1, "attention_dropout": 0.1}
        train(settings(model=model, compile=COMPILED, train_batch_size=2), steps=1)
        found.append(graphs())
    assert len({*found}) == 1
    assert not [line for line in caplog.messages if "recompile_limit" in line]


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["full", "selective"])
def test_compiled_layers_that_recompute_train_like_uncompiled_ones(method: str) -> None:
    model = {"recompute": method, "attention_dropout": 0.1 if method == "full" else 0.0}
    want = train(settings(model=model), steps=1)
    assert_equal_runs(train(settings(model=model, compile=COMPILED), steps=1), want)
    assert graphs() > 0


class Gradients:
    """The sums of the weight gradients, by parameter."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        held = self.sums.get(id(parameter))
        self.sums[id(parameter)] = gradient if held is None else held + gradient


class Parallel(nn.Module):
    """Linears of three kinds, and operations between them that a compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        axis = Axis("tensor")
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, axis=axis)
        self.down = RowParallelLinear(16, 8, axis=axis)
        self.last = nn.Linear(8, 8, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.down(torch.relu(self.up(self.norm(x)))).tanh())


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
def test_w_of_a_compiled_layer_has_the_products_and_i_has_the_rest(backend: str) -> None:
    """inductor reuses the memory of tensors after their last use: those of W must not be reused."""
    from pipemega.config import load
    from pipemega.pipeline.model.compiled_layers import (
        _missing_compiler,
        _options,
        _set_up_compiler,
    )

    section = load({"train_batch_size": 1, "compile": {"backend": backend}}).compile
    torch.manual_seed(0)
    plain = [Parallel(), Parallel()]
    layers = copy.deepcopy(plain)
    gradients = Gradients()
    queue = WeightGradQueue(gradients)
    enable_split_backward(layers, queue)
    for layer in layers:
        trace_deferred_gradients(layer.modules())
    assert _missing_compiler(backend, torch.device("cpu")) is None
    _set_up_compiler()
    function = torch.compile(Parallel.forward, backend=backend, options=_options(section))

    xs = [torch.randn(2, 4, 8) for _ in range(3)]
    for x in xs:
        plain[1](plain[0](x.requires_grad_())).square().sum().backward()
    dxs = [x.grad for x in xs]
    for number, x in enumerate(xs):
        x.grad = None
        # The input of a stage is no leaf.
        y = function(layers[1], function(layers[0], x.view_as(x)))
        with queue.defer(number):
            y.square().sum().backward()
        # Both layers, last first: the order of the products is that of a full backward.
        names = ["last", "down", "up"]
        expected = [layer.get_submodule(n).weight for layer in reversed(layers) for n in names]
        assert [id(job.weight) for job in queue._queued[number]] == [id(w) for w in expected]
        torch.testing.assert_close(x.grad, dxs[number])
    assert gradients.sums == {}
    for number in range(3):
        queue.run(number)
    assert graphs() == 1
    for layer, reference in zip(layers, plain, strict=True):
        for name, parameter in layer.named_parameters():
            want = reference.get_parameter(name).grad
            got = gradients.sums.get(id(parameter), parameter.grad)
            torch.testing.assert_close(got, want, msg=name)


class Wave(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Odd(Wave):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(self.linear(x).tanh() * 0.5)


def engine_of(layers: list[Any], compiled: dict[str, Any]) -> Engine:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "compile": compiled,
    }
    engine, *_ = initialize(PipelineModule(layers, loss_fn=nn.MSELoss()), config)
    return engine


def steps(engine: Engine, number: int = 2) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator))
        for _ in range(number)
    ]
    return [float(engine.train_batch(iter([batch]))) for batch in batches]


WAVES = [LayerSpec(Wave), LayerSpec(Odd), LayerSpec(Wave), LayerSpec(Odd)]


@pytest.fixture
def broken_backend() -> Iterator[str]:
    """A backend that cannot compile erfinv."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        if any("erfinv" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("erfinv has no kernel")
        return graph.forward

    torch._dynamo.register_backend(compile_graph, "broken")
    yield "broken"
    torch._dynamo.backends.registry._BACKENDS.pop("broken")
    torch._dynamo.backends.registry._COMPILER_FNS.pop("broken")


def test_layers_that_cannot_be_compiled_run_uncompiled_with_one_warning(
    broken_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    want = steps(engine_of(WAVES, {"enabled": False}))
    got = steps(engine_of(WAVES, {"enabled": True, "backend": broken_backend}))
    assert got == pytest.approx(want, rel=1e-6)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(
        "Odd (layers.1) could not be compiled, so the 2 layers of its kind on this rank run "
        "uncompiled: "
    )
    assert "erfinv has no kernel" in warning


def test_a_graph_that_another_tensor_rank_cannot_compile_runs_uncompiled_on_this_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the two ranks round differently, and their copies of a parameter drift apart."""

    def gather(value: Any, axis: Axis) -> list[Any]:
        return [value] if axis.name == "world" else [value, "OSError: no space left"]

    def compile_graph(graph: Any, inputs: Any) -> Any:
        return lambda *tensors: [2 * y for y in graph(*tensors)]

    monkeypatch.setattr(compiled_layers, "gather_objects", gather)
    torch._dynamo.register_backend(compile_graph, "doubling")
    layers = [LayerSpec(Wave), LayerSpec(Wave)]
    want = steps(engine_of(layers, {"enabled": False}), 1)
    got = steps(engine_of(layers, {"enabled": True, "backend": "doubling"}), 1)
    assert got == pytest.approx(want, rel=1e-6)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning == (
        "Wave (layers.0) could not be compiled, so the 2 layers of its kind on this rank run "
        "uncompiled: on tensor rank 1, OSError: no space left"
    )


class Numbered(Wave):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) / self.number


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
def test_layers_that_differ_in_an_integer_have_two_graphs(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One for the first integer and one for any: each had its own, and from the ninth on none."""
    layers = [LayerSpec(Numbered, number) for number in range(1, 11)]
    want = steps(engine_of(layers, {"enabled": False}))
    assert steps(engine_of(layers, {"enabled": True, "backend": backend})) == pytest.approx(
        want, rel=1e-6
    )
    assert graphs() == 2
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []
    # Other modules of the user have torch's rule.
    assert not torch._dynamo.config.allow_unspec_int_on_nn_module


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, width), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x @ self.weight) @ self.weight.t()


def test_ten_kinds_of_layers_of_one_class_are_all_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch has a limit of eight graphs for one function; it counts them for each kind."""
    layers = [LayerSpec(Narrow, width) for width in range(2, 12)]
    want = steps(engine_of(layers, {"enabled": False}))
    got = steps(engine_of(layers, {"enabled": True, "backend": "aot_eager"}))
    assert got == pytest.approx(want, rel=1e-6)
    assert graphs() == 10
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []


def test_without_a_compiler_all_layers_run_uncompiled_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.cpp_compiler_search.cache_clear()
    want = steps(engine_of(WAVES, {"enabled": False}))
    assert steps(engine_of(WAVES, {"enabled": True})) == want
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "compile.enabled is true, but there is no C++ compiler: install g++, or set CXX to the "
        "path of one: all layers run uncompiled"
    ]
    assert graphs() == 0


def test_the_default_compiles_on_a_gpu_and_says_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default is not a request: the line is information, not a warning."""
    missing = "triton is not installed"
    monkeypatch.setattr(compiled_layers, "_missing_compiler", lambda backend, device: missing)
    monkeypatch.setattr(CompileSection, "applies", lambda section, device: True)
    caplog.set_level(logging.INFO)
    steps(engine_of(WAVES, {"enabled": "auto"}))
    lines = [r for r in caplog.records if "run uncompiled" in r.message]
    assert [(r.levelno, r.message) for r in lines] == [
        (
            logging.INFO,
            'compile.enabled is "auto", but triton is not installed: all layers run uncompiled',
        )
    ]


def test_a_backend_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'indctor' is no backend.*inductor"):
        engine_of(WAVES, {"enabled": True, "backend": "indctor"})


class Fails(Wave):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)


def test_an_error_of_a_compiled_layer_is_that_of_the_layer() -> None:
    engine = engine_of([LayerSpec(Wave), LayerSpec(Fails)], COMPILED)
    with pytest.raises(PipelineError, match=r"layers.1 \(Fails\) failed: RuntimeError: mat1"):
        steps(engine, 1)


def test_hooks_that_are_added_later_see_the_modules_and_names_do_not_change() -> None:
    plain, engine = engine_of(WAVES, {"enabled": False}), engine_of(WAVES, COMPILED)
    assert set(engine.parameter_state()) == set(plain.parameter_state())
    assert repr(engine.module) == repr(plain.module)
    steps(engine, 1)
    seen: list[str] = []
    layer = engine.module.get_submodule("0.layers.0.linear")
    handle = layer.register_forward_hook(lambda *_: seen.append("linear"))
    steps(engine, 1)
    assert seen == ["linear"]
    handle.remove()
    before = graphs()
    steps(engine, 1)
    assert (seen, graphs()) == (["linear"], before)
