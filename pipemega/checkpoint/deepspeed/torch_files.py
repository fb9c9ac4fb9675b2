"""Reads files of `torch.save` with `weights_only`; objects of unknown classes are left out.

DeepSpeed stores objects beside the tensors: loss scalers, argparse's namespace, objects of the
user's `client_state`. torch refuses such a file as a whole. Here each unknown class is replaced by
`LeftOut`, an object without code, so that no module is imported and nothing of the file runs.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from pipemega.errors import CheckpointError, short_cause


class LeftOut:
    """Stands for an object whose class is not loaded; keeps the plain values of its state.

    Attributes:
        class_name: the full name of the class.
        state: the attributes of the object, if the file has them as a dict; else {}.
    """

    class_name = ""
    state: Mapping[str, Any] = {}

    def __new__(cls, *_: Any, **__: Any) -> "LeftOut":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = state


@dataclass(frozen=True)
class TorchFile:
    """The content of a file.

    Args:
        value: tensors (memory-mapped, on the CPU) and plain values; `LeftOut` for other objects.
        left_out: full names of the classes and functions that were replaced.
    """

    path: Path
    value: Any
    left_out: tuple[str, ...] = ()


def read_torch_file(path: Path) -> TorchFile:
    """Return the content of a file; its tensors are read from the disk when they are used.

    Raises:
        CheckpointError: the file is missing, damaged, or cannot be loaded with `weights_only`.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        unknown = sorted(get_unsafe_globals_in_checkpoint(path)) if is_zip else []
        stand_ins: list[Any] = [
            (type("LeftOut", (LeftOut,), {"class_name": name}), name) for name in unknown
        ]
        with safe_globals(stand_ins):
            value = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    # A damaged file can raise any exception.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be loaded as data (weights_only): {short_cause(error)}. If the file is "
            f"complete, it contains objects of other classes: load it where it was written, and "
            f"save only its tensors again"
        ) from error
    return TorchFile(path, value, tuple(unknown))
