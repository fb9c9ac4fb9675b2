"""Operations whose results are remembered give the results of torch's own kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.layer_costs import tensor_meter
from pipemega.layer_costs.tensor_meter import TensorMeter


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OPERATIONS: dict[str, Callable[[], Any]] = {
    "a transposed argument": lambda: meta(3, 5).t() + meta(5, 3),
    "another order of strides": lambda: meta(5, 3) + meta(3, 5).t(),
    "bool": lambda: meta(3).mul(True),
    "int": lambda: meta(3).mul(1),
    "float": lambda: meta(3).mul(1.0),
    "integers with int": lambda: meta(3, dtype=torch.int64).mul(1),
    "integers with float": lambda: meta(3, dtype=torch.int64).mul(1.0),
    "promotion": lambda: meta(3, dtype=torch.bfloat16) + meta(3),
    "several results": lambda: meta(4, 6).topk(2),
    "a list of tensors": lambda: torch.cat([meta(2, 3), meta(1, 3)]),
    "a view": lambda: meta(4, 6)[1:],
    "a view with a new shape": lambda: torch.ops.aten._unsafe_view(meta(4, 6), [24]),
    "in place": lambda: meta(3).add_(1.0),
    "norm": lambda: F.layer_norm(meta(2, 4), (4,), meta(4), meta(4)),
    "a keyword": lambda: meta(3).sum(dtype=torch.float64),
    "no argument": lambda: torch.full((2,), 1.0, device="meta"),
}


class _Remembered(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tensor_meter.run_operation(func, args, kwargs or {})


def described(result: Any) -> list[Any]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [(t.shape, t.stride(), t.dtype, t.is_meta, t.storage_offset()) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_remembered_result_is_that_of_the_kernel(name: str, dtype: torch.dtype) -> None:
    """All operations share one memory: no entry is used for another operation."""
    torch.set_default_dtype(dtype)
    try:
        want = described(OPERATIONS[name]())
        with _Remembered():
            results = [OPERATIONS[name]() for _ in range(3)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [described(result) for result in results] == [want] * 3


def test_a_remembered_result_has_memory_of_its_own() -> None:
    x = meta(4, 6)
    with TensorMeter([x]) as meter:
        results = [x.mul(2.0) for _ in range(3)]
        assert meter.now == 3 * x.nbytes
        results.pop()
        assert meter.now == 2 * x.nbytes
        views = [torch.ops.aten._unsafe_view(x, [24]) for _ in range(3)]
    assert meter.now == 2 * x.nbytes
    assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)


def test_tensors_of_a_real_device_are_computed() -> None:
    with _Remembered():
        assert torch.equal(torch.ones(3).mul(2.0), torch.full((3,), 2.0))
        assert torch.equal(torch.ones(3).add(2.0), torch.full((3,), 3.0))


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_meter, "_MAX_RESULTS", 4)
    monkeypatch.setattr(tensor_meter, "_known", {})
    with _Remembered():
        for size in range(10):
            meta(size).mul(2.0)
    assert 0 < len(tensor_meter._known) <= 4


def test_the_profiler_records_operations_on_the_meta_device() -> None:
    """Its calls have an effect, and arguments without a hash: an optimizer step failed."""
    with _Remembered():
        for _ in range(2):
            with torch.autograd.profiler.record_function("a step"):
                meta(3).mul(2.0)
