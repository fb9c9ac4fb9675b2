"""On a GPU a step copies its batch from pinned memory; pinning is replaced by a fake here."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipemega import LayerSpec, PipelineModule
from pipemega.distributed import host_memory
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize

STEPS, COUNT = 3, 2


class FakePinning:
    """Records the pinned copies and the thread that made each."""

    def __init__(self) -> None:
        self.threads: dict[int, str] = {}
        self.copies: list[Tensor] = []

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.threads

    def copy(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor).copy_(tensor)
        # Kept, so that no other tensor gets its memory.
        self.copies.append(copy)
        self.threads[copy.untyped_storage().data_ptr()] = threading.current_thread().name
        return copy


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> FakePinning:
    fake = FakePinning()
    monkeypatch.setattr(host_memory, "_is_pinned", fake.is_pinned)
    monkeypatch.setattr(host_memory, "_pinned_copy", fake.copy)
    build = HostMemory.__init__

    def pins_for_meta(self: HostMemory, device: torch.device, *, pin: bool = True) -> None:
        build(self, device, pin=pin)
        self.pins = device.type == "meta"

    monkeypatch.setattr(HostMemory, "__init__", pins_for_meta)
    return fake


class CopiesToDevice(TorchDispatchMode):
    """Records the host tensors that are copied to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_meta:
            self.sources.append(args[0])
        return result


class Samples(Dataset[Any]):
    """Sample i: (inputs, labels) with gaps between their elements."""

    def __init__(self, *, deterministic: bool = True) -> None:
        self.deterministic = deterministic

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(5.0) + index
        return {"x": row[:4], "scale": torch.tensor(1.0)}, row[1:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Samples()[index] for index in range(64))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Any) -> Tensor:
        return self.linear(inputs["x"]) * inputs["scale"].unsqueeze(-1)  # type: ignore[no-any-return]


def build(data: Any, device: str = "meta") -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    net = PipelineModule([LayerSpec(Layer)], nn.functional.mse_loss)
    return initialize(net, config, mesh=Mesh.single(device), training_data=data)[0]


DATA = {
    "read ahead": Samples,
    "read by the step": lambda: Samples(deterministic=False),
    "iterable": Stream,
    "DataLoader": lambda: DataLoader(Samples(), batch_size=2, shuffle=True, drop_last=True),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_is_pinned_in_the_thread_that_reads_it(kind: str, pinning: FakePinning) -> None:
    engine = build(DATA[kind]())
    with CopiesToDevice() as copies:
        for _ in range(STEPS):
            data = engine.steps.read(None, None)
            assert data.inputs[0]["x"].is_meta
            assert data.labels[0].is_meta
    assert len(copies.sources) == 3 * COUNT * STEPS
    for source in copies.sources:
        assert pinning.threads[source.untyped_storage().data_ptr()] == "data-prefetch"
        assert source.is_contiguous()
    assert engine.loader is not None
    engine.loader.close()


def test_the_data_of_a_callers_iterator_is_pinned_by_the_step(pinning: FakePinning) -> None:
    engine = build(None)
    tokens = torch.arange(10.0).view(2, 5)
    pinned = pinning.copy(torch.ones(2))
    with CopiesToDevice() as copies:
        pairs = [({"x": tokens[:, :4], "scale": pinned}, tokens[:, 1:])] * COUNT
        engine.steps.read(iter(pairs), None)
    assert len(copies.sources) == 3 * COUNT
    assert all(pinning.is_pinned(source) for source in copies.sources)
    # A view of pinned memory with gaps is copied; a pinned tensor without gaps is not.
    assert sum(source is pinned for source in copies.sources) == COUNT
    assert all(source.is_contiguous() for source in copies.sources)
    expected = {tuple(tokens[:, :4].flatten().tolist()), tuple(tokens[:, 1:].flatten().tolist())}
    found = {tuple(source.flatten().tolist()) for source in copies.sources if source is not pinned}
    assert found == expected


def test_a_view_of_pinned_memory_with_gaps_is_copied(pinning: FakePinning) -> None:
    memory = HostMemory(torch.device("meta"))
    whole = memory.pinned(torch.arange(6).view(2, 3))
    assert memory.pinned(whole) is whole
    view = memory.pinned(whole[:, :2])
    assert view.is_contiguous()
    assert torch.equal(view, whole[:, :2])
    for other in (
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.ones(2).to("meta"),
    ):
        assert memory.pinned(other) is other


def test_on_a_cpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_pinned_copy", lambda tensor: pytest.fail("pinned"))
    engine = build(Samples(), "cpu")
    engine.train_batch()
    batch = next(engine.loader)  # type: ignore[arg-type]
    assert engine.steps.reader.to_device(batch)[1] is batch[1]
    engine.loader.close()  # type: ignore[union-attr]
