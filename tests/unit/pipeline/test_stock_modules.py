"""Modules as users write them: copies in constructors, hooks, state, assignments, sizes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import PipelineModule
from pipemega.errors import ConfigError
from tests.unit.pipeline.test_from_module import layers_of, run

from_module = PipelineModule.from_module
X = torch.randn(3, 4)


class Text(nn.Module):
    """nn.TransformerEncoder copies its layer with deepcopy."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(tokens)))


class OldWeightNorm(nn.Module):
    """Stores a result of its parameters, and replaces a parameter by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.utils.weight_norm(nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("factory", "inputs"),
    [(Text, torch.tensor([[1, 5, 3]])), (OldWeightNorm, X), (lambda: Text().double(), None)],
)
def test_a_factory_may_copy_and_replace_its_parameters(
    factory: Callable[[], nn.Module], inputs: Any
) -> None:
    net = from_module(factory, inputs)
    assert net.origin is not None
    net.origin.prepare(range(len(net)), seed=5)
    whole = net.origin._source.module(None)
    for position in range(len(net)):
        net.origin.prepare([position], seed=5)
        local = dict(net.origin._source.module(None).named_parameters())
        layer = net.meta_layers[position]
        names = {net.module_name(f"layers.0.{n}") for n, _ in layer.named_parameters()}
        assert {name for name, parameter in local.items() if not parameter.is_meta} == names
        for name in names:
            assert torch.equal(local[name], whole.get_parameter(name)), name
    if isinstance(whole, Text):
        first, second = whole.encoder.layers
        assert torch.equal(first.linear1.weight, second.linear1.weight), "copied with its values"


class Assigned(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        h[:, 0] = 0.5
        h[torch.where(h.sum(1) > 0)[0]] *= 2
        return self.last(h)


class Sized(Linears):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        mask = torch.ones(rows, rows, device=x.device, dtype=x.dtype).tril()
        return self.last(self.first(mask @ x) + torch.zeros((rows, 2 * columns)))


class Hooked(nn.Module):
    """A submodule has hooks, also on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner = nn.Linear(4, 4), Linears()
        self.inner.register_forward_hook(lambda module, inputs, output: output * 2)
        self.inner.register_full_backward_pre_hook(lambda module, gradients: (3 * gradients[0],))
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.start(x)))


class AlwaysDrops(Linears):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.5))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build", [Assigned, Sized, Hooked, AlwaysDrops, OldWeightNorm])
def test_outputs_and_gradients_are_those_of_the_module(build: Callable[[], nn.Module]) -> None:
    module = build()
    plain = build()
    plain.load_state_dict(module.state_dict())
    layers = layers_of(from_module(module, X))
    assert len(layers) == (3 if build is Hooked else 2)
    for x in (X, torch.randn(5, 4)):
        results = []
        for call in (plain, lambda x: run(layers, x)):
            torch.manual_seed(0)
            results.append(call(x))
        torch.testing.assert_close(results[1], results[0])
        for result in results:
            result.square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


class Counting(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.last(self.first(x)) * self.calls


class CountingBuffer(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls = self.calls + 1
        return self.last(self.first(x))


@pytest.mark.parametrize("build", [Counting, CountingBuffer])
def test_a_forward_that_assigns_attributes_is_refused_and_changes_nothing(
    build: Callable[[], nn.Module],
) -> None:
    for given in (module := build(), build):
        # Before torch 2.9, a buffer that is traced cannot be assigned.
        with pytest.raises(
            ConfigError, match=r"forward: (it assigns self.calls, which a graph of|.*cannot assign)"
        ):
            from_module(given, X)
    assert module.calls == 0
    nested = nn.Sequential(module, nn.Linear(2, 40))
    layers = layers_of(from_module(nested))
    run(layers, X)
    assert module.calls == 1, "a small submodule is one call, which keeps its state"


def test_hooks_of_the_module_itself_are_refused() -> None:
    module = Linears()
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(
        ConfigError, match="Linears has hooks of its own forward or backward, which"
    ):
        from_module(module, X)


def test_shapes_of_lazy_modules_must_be_known() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))

    for given in (lazy, lazy()):
        with pytest.raises(ConfigError, match=r"shapes of 0 \(LazyLinear\) are not known yet: run"):
            from_module(given, X)
    built = lazy()
    want = built(X)
    assert torch.equal(run(layers_of(from_module(copy.deepcopy(built), X)), X), want)


def test_a_module_of_one_argument_takes_a_tuple_or_a_dict_too() -> None:
    class WithOptions(Linears):
        def forward(self, x: Tensor, **options: Any) -> Any:
            return super().forward(x)

    module = Linears()
    for example in ((X,), {"x": X}):
        assert torch.equal(run(layers_of(from_module(module, example)), example), module(X))
    with pytest.raises(ConfigError, match=r"forward of WithOptions has no 'scale'; .*\*\*kwargs"):
        from_module(WithOptions(), {"x": X, "scale": 2.0})


def test_an_example_that_the_meta_device_cannot_run_names_the_way_out() -> None:
    class Selecting(Linears):
        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x[torch.where(x[:, 0] > 0)[0]]))

    from_module(Selecting(), X)
    with pytest.raises(ConfigError, match=r"fails .* on the meta device: .* pass a built module"):
        from_module(Selecting, X)
