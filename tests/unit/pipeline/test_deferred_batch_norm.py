"""DeferredBatchNorm in one process: conversion, precision, skipped and partial steps, errors."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega import DeferredBatchNorm, Engine, LayerSpec, PipelineModule, initialize
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipelineError
from pipemega.pipeline.model.batch_norm import Deferral, DeferredBatchNorm2d, defer_batch_norms


class Own(nn.BatchNorm1d):
    """A BatchNorm of the user."""


def mean_loss(y: Tensor, _: Any) -> Tensor:
    return y.float().mean()


def engine_of(net: PipelineModule, **config: Any) -> Engine:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, *_ = initialize(net, settings | config)
    return engine


def norm_of(engine: Engine) -> Any:
    (norm,) = [m for m in engine.module.modules() if isinstance(m, DeferredBatchNorm)]
    return norm


def batches(count: int = 2, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(count)) * scale + 1
    return [(part, torch.zeros(4)) for part in x]


def values(given: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([x for x, _ in given])


def test_conversion_keeps_names_and_hooks_and_leaves_other_classes() -> None:
    net = nn.Sequential(
        nn.BatchNorm2d(3), Own(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3, track_running_stats=False)
    )
    calls: list[int] = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    names = list(net.state_dict())
    assert defer_batch_norms(net, True) is net
    assert [type(each).__name__ for each in net] == [
        "DeferredBatchNorm2d", "Own", "DeferredBatchNorm", "BatchNorm1d"
    ]  # fmt: skip
    assert isinstance(net[0], nn.BatchNorm2d)
    assert [net[0].sync, net[2].sync] == [False, True]
    assert list(net.state_dict()) == names
    net[0](torch.randn(2, 3, 4, 4))
    assert calls == [1]
    with pytest.raises(ValueError, match="4D"):
        net[0](torch.randn(2, 3))


def test_layers_on_several_data_ranks_can_be_copied() -> None:
    """The process group cannot be, so AveragedModel failed."""
    group: Any = threading.Lock()
    layer = DeferredBatchNorm(3)
    layer.axis = Axis("data", (0, 1), group=group)
    copied = torch.optim.swa_utils.AveragedModel(layer).module
    assert copied is not layer
    assert copied.axis is layer.axis


def test_a_step_updates_the_statistics_once_from_all_micro_batches() -> None:
    engine = engine_of(PipelineModule([nn.BatchNorm1d(3)], mean_loss, deferred_batch_norm=True))
    norm, given = norm_of(engine), batches()
    want = nn.BatchNorm1d(3)
    engine.train_batch(iter(given))
    want(values(given))
    for name, value in want.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    assert norm.sums.count_nonzero() == 0


def test_without_a_momentum_the_statistics_are_means_over_the_steps() -> None:
    net = PipelineModule([LayerSpec(DeferredBatchNorm, 3, momentum=None)], mean_loss)
    engine, means = engine_of(net), []
    for scale in (1.0, 2.0, 3.0):
        given = batches(scale=scale)
        engine.train_batch(iter(given))
        means.append(values(given).mean(0))
    torch.testing.assert_close(norm_of(engine).running_mean, torch.stack(means).mean(0))
    assert norm_of(engine).num_batches_tracked == 3


class TwiceNormed(nn.Module):
    """A BatchNorm that is called twice, then one that never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3)

    def train(self, mode: bool = True) -> "TwiceNormed":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.norm(self.norm(x) * 2 + 1))  # type: ignore[no-any-return]


def test_each_batch_norm_is_updated_from_all_of_its_inputs_in_training() -> None:
    volume = nn.Sequential(nn.Unflatten(1, (3, 1, 1, 1)), nn.BatchNorm3d(3, momentum=0.5))
    layers = [nn.BatchNorm1d(3, affine=False), TwiceNormed(), volume]
    inputs: dict[Any, list[Tensor]] = {}
    for norm in nn.Sequential(*layers).modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm3d):
            inputs[norm] = []
            norm.register_forward_pre_hook(lambda m, x: inputs[m].append(x[0].detach().clone()))
    engine = engine_of(PipelineModule(layers, mean_loss, deferred_batch_norm=True))
    engine.train_batch(iter(batches()))
    assert [len(given) for given in inputs.values()] == [2, 4, 2, 2]
    for norm, given in inputs.items():
        wanted = type(norm).__mro__[2](3, momentum=norm.momentum).train(norm.training)
        wanted(torch.cat(given))
        torch.testing.assert_close(norm.running_mean, wanted.running_mean)
        torch.testing.assert_close(norm.running_var, wanted.running_var)
        assert norm.num_batches_tracked == norm.training


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_statistics_are_fp32_in_half_precision(half: str) -> None:
    net = PipelineModule([nn.BatchNorm1d(3)], mean_loss, deferred_batch_norm=True)
    engine, given = engine_of(net, **{half: {"enabled": True}}), batches()
    dtype = torch.float16 if half == "fp16" else torch.bfloat16
    want = nn.BatchNorm1d(3)
    engine.train_batch(iter([(x.to(dtype), y) for x, y in given]))
    want(values(given).to(dtype).float())
    norm = norm_of(engine)
    assert norm.weight.dtype == dtype
    assert norm.running_var.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, want.running_mean)
    torch.testing.assert_close(norm.running_var, want.running_var)


def test_a_skipped_step_changes_no_statistics() -> None:
    net = PipelineModule([nn.BatchNorm1d(3), nn.Linear(3, 3)], mean_loss, deferred_batch_norm=True)
    engine = engine_of(net, fp16={"enabled": True, "initial_scale_power": 8})
    given = [(x.half(), y) for x, y in batches()]
    bad = torch.full((4, 3), torch.inf, dtype=torch.float16), given[1][1]
    engine.train_batch(iter([given[0], bad]))
    assert engine.skipped_steps == 1
    assert norm_of(engine).num_batches_tracked == 0
    assert norm_of(engine).running_mean.tolist() == [0.0, 0.0, 0.0]
    engine.train_batch(iter(given))
    assert engine.skipped_steps == 1
    assert norm_of(engine).num_batches_tracked == 1
    assert norm_of(engine).running_mean.isfinite().all()


def test_a_failed_step_leaves_nothing_for_the_next_one() -> None:
    net = PipelineModule([nn.BatchNorm1d(3)], mean_loss, deferred_batch_norm=True)
    engine, given = engine_of(net), batches()
    with pytest.raises(PipelineError):
        engine.train_batch(iter([given[0], (torch.randn(4, 5), given[1][1])]))
    engine.train_batch(iter(given))
    torch.testing.assert_close(norm_of(engine).running_mean, 0.1 * values(given).mean(0))


def test_a_partial_step_counts_its_samples() -> None:
    data = [(x, torch.zeros(())) for x in torch.randn(6, 3)]
    net = PipelineModule([nn.BatchNorm1d(3)], lambda y, _: y.mean(), deferred_batch_norm=True)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "training": {"epochs": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }  # fmt: skip
    engine, *_ = initialize(net, config, data)
    engine.train_batch()
    want = nn.BatchNorm1d(3)
    want(torch.stack([x for x, _ in data]))
    torch.testing.assert_close(norm_of(engine).running_mean, want.running_mean)
    torch.testing.assert_close(norm_of(engine).running_var, want.running_var)


def test_a_traced_module_is_converted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.bn(self.conv(x)))

    for module in (Net, Net()):
        net = PipelineModule.from_module(module, loss_fn=mean_loss, deferred_batch_norm=True)
        assert isinstance(norm_of(engine_of(net)), DeferredBatchNorm2d)


@pytest.mark.parametrize("deferred", [True, False, "sync"])
def test_one_value_per_channel_is_an_error_with_the_way_out(deferred: Deferral) -> None:
    net = PipelineModule([nn.BatchNorm1d(3)], mean_loss, deferred_batch_norm=deferred)
    engine = engine_of(net, train_micro_batch_size_per_gpu=1)
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter([(torch.randn(1, 3), torch.zeros(1))] * 2))
    text = str(caught.value)
    assert "layers.0 (BatchNorm1d) failed: ValueError: Expected more than 1 value" in text
    assert "[1, 3]" in text
    assert "raise train_micro_batch_size_per_gpu" in text
    assert ("deferred_batch_norm='sync'" in text) == (deferred != "sync")


def test_another_value_of_the_argument_is_refused() -> None:
    given: Any = "yes"
    with pytest.raises(ConfigError, match=r"True, False or 'sync'.*not 'yes'"):
        PipelineModule([nn.ReLU()], deferred_batch_norm=given)


def test_statistics_that_cannot_be_joined_are_refused() -> None:
    """Each data rank used its own ones, without a word."""
    layers = [LayerSpec(nn.BatchNorm1d, 3, track_running_stats=False)]
    engine_of(PipelineModule(layers, mean_loss, deferred_batch_norm=True))
    with pytest.raises(ConfigError, match=r"of BatchNorm1d\(3.*track_running_stats=False"):
        engine_of(PipelineModule(layers, mean_loss, deferred_batch_norm="sync"))
