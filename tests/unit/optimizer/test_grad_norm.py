"""The squared norm of the gradients of each layer, in one process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.optimizer import step_outcome
from pipemega.optimizer.gradients import GradientBuffer, ShardingSpec, bucketed_layout
from pipemega.optimizer.step_outcome import GradientNorms, square_sums
from pipemega.parameters import Shard, attach_shard

Named = list[tuple[str, nn.Parameter]]


def model(layers: Sequence[int], device: str = "cpu", dtype: torch.dtype | None = None) -> Named:
    """Return the parameters of some layers: sharded, replicated and partial ones, in two dtypes."""
    named = []
    for layer in layers:
        parts = {
            "weight": ((40, 7 + layer), Shard((40, 7 + layer), 0, ((0, 40, 0),))),
            "bias": ((40,), Shard((40,), 0, ((0, 40, 0),))),
            "output": ((9, 5), Shard((9, 5))),
            "norm": ((11,), Shard((11,), partial_gradient=True)),
        }
        for name, (shape, shard) in parts.items():
            own = dtype or (torch.float64 if name == "output" else torch.float32)
            parameter = nn.Parameter(torch.zeros(shape, dtype=own, device=device))
            named.append((f"layers.{layer}.{name}", attach_shard(parameter, shard)))
    return named


def filled(named: Named, buffer: GradientBuffer) -> GradientBuffer:
    """Set gradients that depend on the name only."""
    for name, parameter in named:
        seed = sum(map(ord, name))
        generator = torch.Generator().manual_seed(seed)
        buffer.view(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    return buffer


def norms(buffer: GradientBuffer, num_layers: int, **axes: Any) -> GradientNorms:
    device = next(iter(buffer.flats.values())).device
    tied = axes.pop("tied", {})
    return GradientNorms(buffer, replace(Mesh.single(device), **axes), tied, num_layers)


class Operations(TorchDispatchMode):
    """Records the operations that launch kernels: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_layers() -> None:
    counted = []
    for num_layers in (2, 8, 64):
        named = model(range(num_layers), "meta")
        with Operations() as operations:
            compute = norms(GradientBuffer(named), num_layers)
            operations.names.clear()
            compute()
        counted.append(operations.names)
    assert counted[0] == counted[1] == counted[2]
    # Per dtype one multi-tensor operation; per column (at most four runs of a layer) one addition.
    assert counted[0].count("_foreach_norm.Scalar") == 2
    assert counted[0].count("add_.Tensor") == 3
    assert len(counted[0]) <= 15, counted[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3], ids="ZeRO over {}".format)
def test_the_norm_of_each_layer_is_that_of_its_gradients(
    ranks: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(step_outcome, "square_sums", step_outcome._square_sums_on_device)
    total = torch.zeros(6, dtype=torch.float64)
    for rank in range(ranks):
        named = model([0, 2, 4])
        # Small buckets: their slices divide layers, and parameters, between the ranks.
        data = Axis("data", tuple(range(ranks)), rank)
        spec = ShardingSpec(data, 150, partial={n for n, _ in named if "norm" in n})
        layout = None if ranks == 1 else bucketed_layout(named, None, spec)
        buffer = filled(named, GradientBuffer(named, layout=layout))
        total += norms(buffer, 5, data=data)()
    expected = [0.0] * 6
    for name, parameter in named:
        gradient = buffer.view(parameter).double()
        expected[int(name.split(".")[1])] += float((gradient * gradient).sum())
    assert total.tolist() == pytest.approx(expected, rel=1e-14)
    assert total[1] == total[3] == total[5] == 0


def test_the_norm_of_a_layer_has_the_same_bits_beside_any_other_layers() -> None:
    """So a norm does not depend on which pipeline rank has which layers."""
    alone = norms(filled(named := model([1]), GradientBuffer(named)), 4)()
    # With one dtype less, layer 3 has fewer runs than layer 1, and the other way round.
    for layers, dtype in (([0, 1, 2], None), ([1, 3], None), ([1], None)):
        others = model([n for n in layers if n != 1], dtype=torch.float64)
        named = model([1], dtype=dtype) + others
        together = norms(filled(named, GradientBuffer(named)), 4)()
        assert torch.equal(together[1], alone[1])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_only_the_layer_of_a_nonfinite_gradient_is_not_finite(bad: float) -> None:
    named = model([0, 1, 2])
    buffer = filled(named, GradientBuffer(named))
    for name, parameter in named:
        if name.startswith("layers.1."):
            buffer.view(parameter)[-1] = bad
    first, second, third, broken = norms(buffer, 3)().tolist()
    assert not second < float("inf")
    assert broken == 1.0
    assert 0 < first < float("inf")
    assert 0 < third < float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_square_sums_on_a_device_equal_those_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (1, 1000, 7)]
    tensors.insert(1, torch.randn(5, generator=generator))
    got = step_outcome._square_sums_on_device(tensors)
    assert got.tolist() == pytest.approx(square_sums(tensors).tolist(), rel=1e-14)


def test_the_square_of_a_complex_gradient_has_both_parts() -> None:
    """The norm was that of the real part, with a warning of torch."""
    tensors = [torch.tensor([3 + 4j, 1j], dtype=torch.complex128), torch.tensor([2.0])]
    assert square_sums(tensors).tolist() == [26.0, 4.0]
