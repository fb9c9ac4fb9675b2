"""Runs operations on the meta device once for each description of their arguments.

Most kernels of the meta device are Python functions, which take 0.1 to 0.5 ms. The layers of a
model repeat a few operations, whose results differ only in their memory.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Of all models and micro-batch sizes that a process counts.
_MAX_RESULTS = 20_000

_PLAIN = (
    NoneType, bool, int, float, complex, str,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _Result(NamedTuple):
    """A tensor on the meta device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _UnknownError(Exception):
    """The arguments do not determine the result, or it shares memory."""


_known: dict[Any, Any] = {}


def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`, for an operation that a TorchDispatchMode sees.

    If its tensors are on the meta device, and the result has memory of its own, it is built from
    the shapes, strides and dtypes of an earlier result.
    """
    if func.is_view or func._schema.is_mutable:
        return func(*args, **kwargs)
    try:
        # Otherwise a TorchFunctionMode sees each attribute of a tensor that is read.
        with torch._C.DisableTorchFunction():
            named = tuple(kwargs.items())
            key = (func, torch.get_default_dtype(), _key_of(args), _key_of(named))
        found = _known.get(key)
    except _UnknownError:
        return func(*args, **kwargs)
    if found is not None:
        return _build(found)
    result = func(*args, **kwargs)
    try:
        kept = _describe(result, _storages(args) | _storages(tuple(kwargs.values())))
    except _UnknownError:
        return result
    if len(_known) >= _MAX_RESULTS:
        _known.clear()
    _known[key] = kept
    return result


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, nn.Parameter):
            raise _UnknownError
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _UnknownError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_key_of, value)
    if not isinstance(value, _PLAIN):
        # Such as the record of torch's profiler, which has an effect.
        raise _UnknownError
    # The type: 1, 1.0 and True are equal.
    return type(value), value


def _storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, list | tuple):
        return set[int]().union(*map(_storages, value))
    return set()


def _describe(result: Any, shared: set[int]) -> Any:
    """Return `result` with a `_Result` in place of each tensor.

    Args:
        shared: storages that no tensor of it may have; those of its tensors are added.
    """
    if isinstance(result, list | tuple):
        if type(result) not in (list, tuple):
            raise _UnknownError
        return type(result)(_describe(each, shared) for each in result)
    _key_of(result)
    if not isinstance(result, Tensor):
        return result
    storage = result.untyped_storage()
    kept = _Result(tuple(result.shape), result.stride(), result.dtype)
    if storage._cdata in shared or storage.nbytes() != kept.build().untyped_storage().nbytes():
        raise _UnknownError
    shared.add(storage._cdata)
    return kept


def _build(kept: Any) -> Any:
    if isinstance(kept, _Result):
        return kept.build()
    if isinstance(kept, list | tuple):
        return type(kept)(map(_build, kept))
    return kept
