"""Folders of safetensors files as transformers writes them, read by slices.

    model.safetensors                       all tensors in one file, or
    model.safetensors.index.json            tensor name -> file, and
    model-00001-of-00003.safetensors ...

Only slices of tensors are read, and no file is ever in memory as a whole.

WeightSource: where the parameters of a Hugging Face model get their first values from.

Parameters that transformers keeps in fp32 in a model of half precision.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipemega.errors import CheckpointError, ConfigError
from pipemega.parameters import is_kept_fp32, is_transposed, keep_fp32_in, mark_transposed
from pipemega.printing import listed

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# A file is mapped into memory. After this many bytes it is opened again, so that the pages that
# were read do not count as memory of this process any more.
_MOST_MAPPED = 64 << 20


class StoredEntry(NamedTuple):
    """A tensor in a file: the file's name, the shape, the dtype."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFolder:
    """The tensors of a folder.

    Args:
        folder: contains `model.safetensors`, or an index and the files that it lists.

    Raises:
        CheckpointError: the folder, or a file that the index lists, is missing or damaged; a tensor
            has a dtype that no unquantized model has; the weights are not in safetensors files.
        ConfigError: safetensors is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, StoredEntry] = {}
        self.bytes_read = 0
        self._open_files: dict[str, Any] = {}
        self._mapped = 0
        for file, names in self._listed_files().items():
            self._read_header(file, names)

    def read(self, name: str, index: tuple[slice | int, ...] = ()) -> Tensor:
        """Return tensor[index], a view of the file that is valid until the next read."""
        entry = self.entries[name]
        if self._mapped > _MOST_MAPPED:
            self._open_files.clear()
            self._mapped = 0
        opened = self._opened(entry.file)
        # A slice of a tensor without dims cannot be taken.
        part: Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
        size = part.numel() * part.element_size()
        self.bytes_read += size
        self._mapped += size
        return part

    def _opened(self, file: str) -> Any:
        if file not in self._open_files:
            self._open_files[file] = _open(self.folder / file)
        return self._open_files[file]

    def _listed_files(self) -> dict[str, list[str] | None]:
        """Return file -> the tensors that the index expects in it; None: there is no index."""
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder: is the path right?")
        index = self.folder / INDEX_FILE
        # transformers prefers it to an index, too.
        if (self.folder / WEIGHTS_FILE).is_file():
            return {WEIGHTS_FILE: None}
        if index.exists():
            files = _files_of_index(index)
            missing = sorted(name for name in files if not (self.folder / name).is_file())
            if missing:
                raise CheckpointError(
                    f"{self.folder} has {len(files) - len(missing)} of the {len(files)} files that "
                    f"{INDEX_FILE} lists; missing: {listed(missing)}. Copy the whole folder again"
                )
            return dict(sorted(files.items()))
        pickles = sorted(path.name for path in self.folder.glob("pytorch_model*.bin"))
        if pickles:
            raise CheckpointError(
                f"{self.folder} has its weights in {pickles[0]}, and no safetensors files. Pickle "
                f"files are not read, because loading one can run code. Convert it once, with "
                f'"model = transformers.AutoModel.from_pretrained({str(self.folder)!r})" and '
                f'"model.save_pretrained(NEW_FOLDER)", with the class that config.json lists as '
                f"its architecture in place of AutoModel"
            )
        raise CheckpointError(
            f"{self.folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there"
        )

    def _read_header(self, file: str, expected: list[str] | None) -> None:
        path = self.folder / file
        opened = _open(path)
        names = set(opened.keys())
        absent = sorted(set(expected or ()) - names)
        if absent:
            raise CheckpointError(
                f"{path} is damaged or of another model: {INDEX_FILE} lists {listed(absent)} in "
                f"it, and it has no such tensors"
            )
        for name in expected if expected is not None else names:
            held = opened.get_slice(name)
            dtype = DTYPES.get(held.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{name} in {path} has the dtype {held.get_dtype()}, which only quantized "
                    f"models have; these can be read: {', '.join(DTYPES)}. Use the weights that "
                    f"were not quantized, or write them with transformers' `dequantize()`"
                )
            self.entries[name] = StoredEntry(file, tuple(held.get_shape()), dtype)


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            "weights of Hugging Face models need safetensors: pip install 'pipemega[hf]'"
        ) from error
    try:
        return safe_open(str(path), "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): copy or download the file again"
        ) from error


def _files_of_index(path: Path) -> dict[str, list[str]]:
    """Return file -> tensors.

    Raises:
        CheckpointError: the index is damaged, or names a file outside of its folder.
    """
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        pairs = [(str(file), str(name)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}): it should contain "
            f'{{"weight_map": {{tensor: file}}}}; copy or download it again'
        ) from error
    files: dict[str, list[str]] = {}
    for file, name in pairs:
        if Path(file).name != file:
            raise CheckpointError(f"{path} lists the file {file!r}, which is not in its folder")
        files.setdefault(file, []).append(name)
    return files


__all__ = ["WeightSource", "is_transposed", "mark_transposed"]


class WeightSource(Protocol):
    """Reads parameters and buffers by their names in the state_dict of the transformers model."""

    def has(self, name: str) -> bool:
        """Return whether there is a value; without one, HF initialises the parameter."""

    def load(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor`, this rank's shard (`parameters.shard_of`) of HF's tensor `name`.

        If `is_transposed(tensor)`, HF stores the transpose of the logical tensor.
        """


def keep_in_fp32(module: nn.Module, model: Any, path: str) -> None:
    """Mark the parameters of `module` that the model keeps in fp32.

    Args:
        model: the transformers model.
        path: name of `module` in the model.
    """
    for name, parameter in module.named_parameters():
        full = f"{path}.{name}"
        dtypes = (torch.float16, torch.bfloat16)
        kept = tuple(dtype for dtype in dtypes if stays_fp32(model, full, dtype))
        if kept:
            keep_fp32_in(parameter, kept)


def stays_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether transformers keeps a tensor in fp32 in a model of `dtype`.

    `_keep_in_fp32_modules` applies to fp16, `_keep_in_fp32_modules_strict` to bf16 too. As in
    transformers, they are searched for in the whole name.
    """
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def cast_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return (owner, name) of a parameter that has the dtype of the run; None if all are fp32."""
    cast = (
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and not is_kept_fp32(parameter, torch.float16)
    )
    return next(cast, None)
