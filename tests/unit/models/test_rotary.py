"""Rotary positions: the tables of cosines and sines are shared and change no result."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.models import rotary
from pipemega.models.rotary import Rotary
from tests.ranks.training_runs import build, data, settings
from tests.sampling import some

ROPE = {"position_embedding_type": "rope", "num_layers": 3, "hidden_dropout": 0.0}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _no_tables() -> Iterator[None]:
    rotary._counted.clear()
    rotary._given.clear()
    yield
    rotary._counted.clear()
    rotary._given.clear()


class Cosines(TorchDispatchMode):
    """Records the length of each table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cos.default:
            self.lengths.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


def rotated(x: Tensor, positions: Tensor, dim: int, base: float) -> Tensor:
    """Rotate with angles that are computed for this call."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = positions.unsqueeze(-1) * base**-exponents
    cos = angles.cos().repeat(1, 1, 2).unsqueeze(1).to(x.dtype)
    sin = angles.sin().repeat(1, 1, 2).unsqueeze(1).to(x.dtype)
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_tables_give_bitwise_the_result_of_new_ones(dtype: torch.dtype) -> None:
    layer = Rotary(12, 10000.0)
    # Longer, shorter and equal lengths, and lengths that are no power of two.
    for length in (5, 33, 7, 33, 32, 1, 129):
        q, k = torch.randn(2, 2, 3, length, 16, dtype=dtype).unbind()
        counted = torch.arange(length).unsqueeze(0)
        given = torch.randint(1000, (2, length))
        for positions in (None, given, given):
            at = counted if positions is None else positions
            for got, x in zip(layer(q, k, positions), (q, k), strict=True):
                assert torch.equal(got, rotated(x, at, 12, 10000.0))


@pytest.mark.parametrize("recompute", some(["none", "selective", "full"], 0, 2))
@pytest.mark.parametrize("schedule", ["sequential", "zb-h1"])
def test_a_run_computes_one_table(schedule: str, recompute: str) -> None:
    engine = build(
        settings(model={**ROPE, "recompute": recompute}, pipeline={"schedule": schedule})
    )
    assert engine.batch.num_microbatches > 1
    with Cosines() as cosines:
        for step in range(2):
            engine.train_batch(data(engine, step))
    assert len(cosines.lengths) == 1


def test_layers_share_the_table_of_the_positions_of_a_micro_batch() -> None:
    layers = [Rotary(4, 10000.0) for _ in range(3)]
    q, k = torch.randn(2, 2, 1, 8, 4).unbind()
    first, second = torch.arange(8).expand(2, 8) % 3, torch.arange(8).expand(2, 8) % 5
    with Cosines() as cosines:
        for positions in (first, second):
            for layer in layers:
                layer(q, k, positions)
    assert len(cosines.lengths) == 2
    second = second.clone()
    layers[0](q, k, second)
    second.add_(1)
    changed, _ = layers[0](q, k, second)
    assert torch.equal(changed, rotated(q, second, 4, 10000.0))
    del second, positions
    assert not rotary._given  # the table is freed with the positions


@pytest.mark.parametrize("given", [False, True])
def test_a_table_made_in_inference_mode_is_used_in_training(given: bool) -> None:
    layer = Rotary(4, 10000.0)
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    positions = torch.arange(8).unsqueeze(0) % 3 if given else None
    with torch.inference_mode():
        layer(q, q, positions)
        layer(q, q, torch.arange(8).unsqueeze(0))  # positions that are inference tensors
    with Cosines() as cosines:
        layer(q, q, positions)[0].sum().backward()
    assert q.grad is not None
    assert not cosines.lengths
    assert not any(t.is_inference() for table in rotary._counted.values() for t in table)


def test_the_number_of_tables_is_bounded_and_a_growing_sequence_computes_few() -> None:
    q = torch.randn(1, 1, 4, 4)
    for base in range(2, 40):
        Rotary(4, float(base))(q, q, None)
    assert len(rotary._counted) == rotary._MOST_TABLES
    layer = Rotary(4, 10000.0)
    with Cosines() as cosines:
        for length in range(1, 101):
            q = torch.randn(1, 1, length, 4)
            layer(q, q, None)
    assert cosines.lengths == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("given", [False, True])
def test_a_compiled_layer_has_no_graph_break_and_keeps_no_tensor_of_its_graph(given: bool) -> None:
    layer = Rotary(4, 10000.0)
    q, k = torch.randn(2, 2, 1, 8, 4).unbind()
    positions = torch.arange(8).expand(2, 8) % 3 if given else None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = compiled(q, k, positions)
    assert not rotary._counted
    assert not rotary._given
    for mine, expected in zip(got, layer(q, k, positions), strict=True):
        assert torch.equal(mine, expected)


def test_on_the_meta_device_a_table_takes_no_memory() -> None:
    q = torch.empty(1, 1, 64, 4, device="meta")
    turned, _ = Rotary(4, 10000.0)(q, q, None)
    assert turned.shape == q.shape
    assert not rotary._counted
