"""Which reductions of ZeRO wait for others; the collective is a fake that records its calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.optimizer import zero
from pipemega.optimizer.gradients import (
    DataReduction,
    GradientBuffer,
    ShardingSpec,
    bucketed_layout,
)
from pipemega.optimizer.zero import ReduceScatter

NUM_BUCKETS = 5


class Calls:
    """The reduce-scatters of a device: what they read and write, and in which order they end."""

    def __init__(self) -> None:
        self.storages: list[tuple[int, int]] = []
        self.waited: list[int] = []

    def reduce_scatter(self, received: Tensor, sent: Tensor, **_: Any) -> Any:
        number, waited = len(self.storages), self.waited
        self.storages.append((storage(received), storage(sent)))

        class Work:
            def wait(self) -> None:
                waited.append(number)

        return Work()


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def reduction_on_a_device(
    monkeypatch: pytest.MonkeyPatch, window: int, dtype: torch.dtype | None
) -> tuple[ReduceScatter, GradientBuffer, Calls]:
    named = [
        (f"layers.{i}.weight", nn.Parameter(torch.empty(100, device="meta")))
        for i in range(NUM_BUCKETS)
    ]
    layout = bucketed_layout(named, None, ShardingSpec(Axis("data", (0, 1), 1), 100))
    assert len(layout.buckets) == NUM_BUCKETS
    gradients, calls = GradientBuffer(named, layout=layout), Calls()
    monkeypatch.setattr(zero, "reduce_scatter_single", calls.reduce_scatter)
    return ReduceScatter(gradients, 2, DataReduction(dtype=dtype), window), gradients, calls


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("window", [1, 2])
def test_reductions_in_place_wait_only_at_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch, window: int, dtype: torch.dtype | None
) -> None:
    scatter, gradients, calls = reduction_on_a_device(monkeypatch, window, dtype)
    for _ in range(2):
        for _ in range(NUM_BUCKETS):
            scatter.start_next()
        assert len(calls.storages) == NUM_BUCKETS
        assert calls.waited == []
        # In place: more reductions in flight need no more memory.
        assert {*calls.storages} == {2 * (storage(gradients.flats[torch.float32]),)}
        scatter.finish()
        assert calls.waited == [*range(NUM_BUCKETS)]
        assert scatter.started == 0
        calls.storages.clear()
        calls.waited.clear()


@pytest.mark.parametrize("window", [1, 2])
def test_reductions_in_another_dtype_wait_until_a_temporary_buffer_is_free(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    scatter, gradients, calls = reduction_on_a_device(monkeypatch, window, torch.bfloat16)
    for number in range(1, NUM_BUCKETS + 1):
        scatter.start_next()
        assert calls.waited == [*range(number - window)]
    assert storage(gradients.flats[torch.float32]) not in {
        s for pair in calls.storages for s in pair
    }
    scatter.finish()
    assert calls.waited == [*range(NUM_BUCKETS)]
