"""Layers that run as graphs, with recorded operations on the CPU."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, PipelineError
from pipemega.pipeline.plan.instructions import Instruction
from pipemega.pipeline.plan.lowering import most_in_flight
from tests.ranks import recorded_graphs, small_models
from tests.ranks.recorded_graphs import graphs_on_cpus
from tests.ranks.training_runs import build, data, settings

GRAPHS = {"compile": {"enabled": False, "cuda_graphs": True}}


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with graphs_on_cpus():
        yield


def test_the_slots_of_a_stage_are_the_micro_batches_in_flight() -> None:
    text = "F0@0 F1@0 I0@0 F2@0 W0@0 F0@1 B0@1 I1@0 W1@0 I2@0 W2@0"
    assert most_in_flight(tuple(map(Instruction.parse, text.split()))) == {0: 3, 1: 1}


def test_the_tests_call_torch_with_arguments_that_it_has() -> None:
    ours = inspect.signature(recorded_graphs.make_graphed_callables).parameters
    theirs = inspect.signature(recorded_graphs.ORIGINAL).parameters
    assert [*ours.values()][2].default == theirs["num_warmup_iters"].default
    assert [*theirs][2:4] == [*ours][2:4]
    assert "capture_error_mode" in inspect.signature(torch.cuda.graph).parameters


@pytest.mark.parametrize("epochs", [None, 1])
def test_a_run_has_the_same_bits_with_data_from_an_iterator_and_with_given_data(
    epochs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for keys in ({}, GRAPHS):
        changes = {"training": {"epochs": epochs}} if epochs else {}
        model = {"hidden_dropout": 0.0}
        engine = build(settings(pipeline={"schedule": "gpipe"}, model=model, **keys, **changes))
        losses = [engine.train_batch(None if epochs else data(engine, step)) for step in range(3)]
        losses.append(engine.eval_batch(data(engine, 9)))
        runs.append((losses, engine.parameter_state()))
        engine.close()
    assert_same(*runs)
    # The embedding compares the ids with the size of the vocabulary, on a CPU.
    assert "captured 5 of 7 layers as CUDA graphs, for 12 micro-batches in flight" in caplog.text


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Random(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(super().forward(x), 0.5, self.training)


class Changing(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Linear())
        self[0].register_forward_hook(lambda module, args, output: output * 2)


class Counting(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, 7


class Counted(Linear):
    def forward(self, pair: tuple[Tensor, int]) -> Tensor:
        return super().forward(pair[0]) * pair[1]


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.view_as(y)


class Changed(Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[0].mul_(3)
        return super().forward(pair[1])


class Norm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4)


class Reading(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if float(x.detach()[0, 0]) > 0 else -y


class Backward(Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            super().forward(x.detach()).square().mean().backward()
        return super().forward(x)


def hooked_weight() -> nn.Module:
    layer = Linear()
    layer.weight.register_hook(lambda gradient: gradient / 2)
    return layer


def normalized() -> nn.Module:
    return torch.nn.utils.spectral_norm(Linear())


def twice(layer: nn.Module, x: Tensor) -> Tensor:
    first: Tensor = layer(x)
    again: Tensor = layer(first)
    return again


def tied(forward_fn: Any = None) -> TiedLayerSpec:
    return TiedLayerSpec("weight", Linear, forward_fn=forward_fn, tied_weight_attr="weight")


def engine_of(specs: list[LayerSpec], **keys: Any) -> Engine:
    net = PipelineModule([LayerSpec(Linear), *specs, LayerSpec(Linear)], nn.MSELoss())
    return small_models.engine_of(net, **keys)


def pairs(step: int, count: int = 4, rows: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(count):
        x = torch.randn(rows, 4, generator=generator)
        yield x, x.flip(-1)


@pytest.mark.parametrize(
    ("specs", "captured", "reason"),
    [
        ([LayerSpec(Linear)], 2, None),
        ([LayerSpec(Norm)], 2, None),
        ([LayerSpec(Both), LayerSpec(Changed)], 1, "its inputs and outputs share memory"),
        ([LayerSpec(Random)], 1, "it draws random numbers on the host"),
        ([LayerSpec(Changing)], 1, "it changes its input"),
        ([LayerSpec(Hooked)], 1, "it has hooks"),
        ([LayerSpec(hooked_weight)], 1, "it has hooks"),
        ([LayerSpec(normalized)], 1, "it has hooks"),
        ([LayerSpec(Reading)], 1, "it reads a value on the host"),
        ([LayerSpec(Backward)], 1, "it runs a backward in its forward"),
        (
            [LayerSpec(Counting), LayerSpec(Counted)],
            1,
            "its inputs and outputs are not only tensors",
        ),
        (
            [tied(twice)],
            1,
            "it ran 2 times in a forward",
        ),
        ([tied(), tied()], 1, "it shares a parameter with another layer"),
    ],
)
def test_layers_that_a_graph_would_change_run_without(
    specs: list[LayerSpec], captured: int, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for keys in ({}, GRAPHS):
        engine = engine_of(specs, **keys)
        losses = [engine.train_batch(pairs(step)) for step in range(3)]
        runs.append((losses, engine.parameter_state()))
        engine.close()
    assert_same(*runs)
    assert f"captured {captured} of {len(specs) + 2} layers" in caplog.text
    if reason is not None:
        assert f"runs without: {reason}" in caplog.text


def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one at each forward of a `Linear` that is not replayed."""
    calls: list[int] = []
    forward = nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(1)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    return calls


def test_a_step_replays_the_layers_and_a_micro_batch_of_another_shape_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = forwards(monkeypatch)
    engine = engine_of([LayerSpec(Linear)], **GRAPHS)
    engine.train_batch(pairs(0))
    calls.clear()
    engine.train_batch(pairs(1))
    assert len(calls) == 4  # the last layer
    calls.clear()
    engine.train_batch((x[:, None], y[:, None]) for x, y in pairs(2))
    engine.eval_batch(pairs(2))
    # The evaluation begins with a run of one micro-batch.
    assert len(calls) == 3 * (4 + 1 + 4)
    engine.close()


def test_hooks_that_are_added_later_are_called() -> None:
    engine, seen = engine_of([LayerSpec(nn.Sequential, Linear())], **GRAPHS), list[int]()
    engine.train_batch(pairs(0))
    inner = engine.steps.model.stages[0].layers["1"][0]
    inner.register_forward_hook(lambda *_: seen.append(1))
    engine.train_batch(pairs(1))
    assert len(seen) == 4
    engine.close()


def test_parameters_with_other_memory_are_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for keys in ({}, GRAPHS):
        engine = engine_of([LayerSpec(Linear)], **keys)
        losses = [engine.train_batch(pairs(0))]
        for parameter in engine.steps.model.stages[0].layers["1"].parameters():
            parameter.data = parameter.data * 2
        losses.append(engine.train_batch(pairs(1)))
        runs.append((losses, engine.parameter_state()))
        engine.close()
    assert_same(*runs)
    assert caplog.text.count("captured 2 of 3 layers") == 2


def test_a_layer_that_cannot_be_captured_ends_the_run_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    engine = engine_of([], **GRAPHS)
    with pytest.raises(
        PipelineError,
        match=r"the layers of stage 0 cannot be captured as CUDA graphs \(RuntimeError: operation "
        r"not permitted when stream is capturing\): set compile.cuda_graphs to false",
    ):
        engine.train_batch(pairs(0))
    engine.close()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model": {"recompute": "full"}}, "model.recompute 'full'"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing.cpu_checkpointing",
        ),
    ],
)
def test_keys_that_would_free_the_memory_of_graphs_are_refused(
    keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs keeps the memory of all acti") as raised:
        load(settings(**keys, **GRAPHS))
    assert named in str(raised.value)
