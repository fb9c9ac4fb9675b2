"""Background saves contain the state at the save, although its copies arrive during later steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.checkpoint import checkpointer
from pipemega.checkpoint.async_save import BackgroundTask
from pipemega.distributed.mesh import Axis
from pipemega.engine.engine import Engine
from tests.ranks.small_models import squared_error
from tests.unit.late_copies import LateHostMemory


class LateTask(BackgroundTask):
    """Writes when somebody waits for it, at the latest moment."""

    action: Callable[[Axis], object] | None = None

    def start(self, action: Callable[[Axis], object]) -> None:
        assert self.action is None
        self.action = action

    def wait(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action(self.connect())


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    LateHostMemory.reset(torch.device("cpu"))
    monkeypatch.setattr(checkpointer, "HostMemory", LateHostMemory)
    monkeypatch.setattr(checkpointer, "BackgroundTask", LateTask)


class RunningMean(nn.Module):
    """Keeps a statistic in a buffer, as batch norm does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0))
        return x * 2


def engine_of(**changes: Any) -> Engine:
    """Return an engine whose forwards change buffers, and whose parameters all change."""
    layers = [LayerSpec(nn.Linear, 5, 5), LayerSpec(RunningMean), LayerSpec(nn.Linear, 5, 3)]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "checkpoint": {"async": True},
        "mesh": {"device": "cpu"},
        **changes,
    }
    return initialize(PipelineModule(layers, squared_error), config)[0]


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return ((torch.randn(4, 5, generator=generator), torch.ones(4, 3)) for _ in range(2))


def train(engine: Engine, *steps: int) -> list[float]:
    return [engine.train_batch(batches(step)) for step in steps]


def waits() -> list[str]:
    return [what for _, what in LateHostMemory.log if what in ("waits", "synchronizes")]


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_background_save_has_the_state_of_its_step_and_does_not_wait(
    precision: dict[str, Any], tmp_path: Path
) -> None:
    engine = engine_of(**precision)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    assert waits() == []
    losses = train(engine, 2)
    # On the device, before the update.
    assert waits() == ["waits"]
    losses += train(engine, 3)
    assert waits() == ["waits"]
    engine.finish_saving()
    assert waits() == ["waits", "synchronizes"]

    resumed = engine_of(**precision)
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 3) == losses
    state, expected = resumed.module.state_dict(), engine.module.state_dict()
    assert any("mean" in name for name in expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_all_saves_use_one_buffer_until_the_shapes_change(tmp_path: Path) -> None:
    engine = engine_of()
    staging = engine.run.checkpointer._staging

    def storages() -> set[int]:
        return {view.untyped_storage().data_ptr() for view in staging._views.values()}

    # Before the first step there is no optimizer state.
    engine.save_checkpoint(tmp_path, tag="initial")
    initial = storages()
    assert len(initial) == 1
    seen = []
    for step in range(3):
        train(engine, step)
        engine.save_checkpoint(tmp_path)
        seen.append(storages())
    engine.finish_saving()
    assert len(seen[0]) == 1
    assert seen[0] == seen[1] == seen[2]


def test_pinned_memory_for_all_saves_is_allocated_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allocated: list[int] = []

    class Pinning(LateHostMemory):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.pins = True

        def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
            allocated.append(torch.Size(shape).numel() * dtype.itemsize)
            self.pins = False  # torch pins nothing here
            try:
                return super().empty(*shape, dtype=dtype)
            finally:
                self.pins = True

    monkeypatch.setattr(checkpointer, "HostMemory", Pinning)
    engine = engine_of(checkpoint={"async": True, "save": str(tmp_path)})
    assert len(allocated) == 1
    # Before the first step there is no optimizer state; later it fits too.
    engine.save_checkpoint(tmp_path, tag="initial")
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    engine.finish_saving()
    assert len(allocated) == 1
    views = engine.run.checkpointer._staging._views.values()
    assert 0.5 * allocated[0] - 2**20 < sum(view.nbytes for view in views) < allocated[0]


def test_loading_waits_for_a_save_in_the_background(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, 0)
    engine.save_checkpoint(tmp_path, tag="first")
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="second")
    # The copies of the second save are not complete.
    engine.load_checkpoint(tmp_path, tag="first")
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, expected[name]), name
    LateHostMemory.log.clear()
    losses = train(engine, 1)
    engine.load_checkpoint(tmp_path, tag="second")
    second = train(engine, 2)
    engine.load_checkpoint(tmp_path, tag="first")
    assert train(engine, 1, 2) == losses + second
