"""The client state of DeepSpeed scripts as values that a checkpoint can contain, and back.

Scripts save argparse namespaces, numpy arrays and numbers with it; a checkpoint contains tensors
and plain values only, so that loading it runs no code.
"""

from argparse import Namespace
from typing import Any

import numpy as np
import torch

_NAMESPACE, _ARRAY = "argparse.Namespace", "numpy.ndarray"


def encoded(value: Any) -> Any:
    """Return `value` with namespaces and arrays as tagged dicts."""
    if isinstance(value, Namespace):
        return {_NAMESPACE: encoded(vars(value))}
    if isinstance(value, np.ndarray) and value.dtype != object:
        stored = value.astype(_stored_dtype(value.dtype))
        return {_ARRAY: torch.from_numpy(stored), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: encoded(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(encoded(part) for part in value)
    return value


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(value, dict):
        if value.keys() == {_NAMESPACE}:
            return Namespace(**decoded(value[_NAMESPACE]))
        if value.keys() == {_ARRAY, "dtype"}:
            return value[_ARRAY].numpy().astype(value["dtype"])
        return {key: decoded(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(decoded(part) for part in value)
    return value


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for torch, which has few operations for unsigned integers."""
    return np.dtype(np.int64) if dtype.kind == "u" and dtype.itemsize < 8 else dtype
