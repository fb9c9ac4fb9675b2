"""Write safetensors files tensor by tensor; no file is in memory as a whole.

safetensors' own `save_file` needs all tensors of a file at once. Its package is not used here.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.save_load import CheckpointReader
from pipemega.errors import CheckpointError
from pipemega.hf.safetensors_files import DTYPES, INDEX_FILE, WEIGHTS_FILE

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_tensors(reader: CheckpointReader, path: Path) -> dict[str, Tensor]:
    """Write the parameters and buffers of a checkpoint of any model, unsharded, to one file.

    The dtypes are those of the checkpoint: of bf16 and fp16 runs the fp32 master weights.

    Args:
        path: of the new file, which appears when it is complete.

    Returns:
        Logical name -> meta tensor.

    Raises:
        CheckpointError: the file exists, or a dtype has no name in the format.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists: name a new file, or delete it")
    keys, tensors = dict[str, str](), dict[str, Tensor]()
    for key, (shape, dtype) in reader.tensors.tensors.items():
        group, _, name = key.partition("/")
        if group in ("parameters", "buffers"):
            if dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name} is {dtype}, which safetensors files do not have")
            keys[name], tensors[name] = key, torch.empty(shape, dtype=dtype, device="meta")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.exporting")
    writer = SafetensorsWriter(temporary, tensors)
    try:
        for name, key in keys.items():
            writer.write(name, reader.tensors.read_full(key))
        writer.close()
    except BaseException:
        writer.abort()
        temporary.unlink()
        raise
    temporary.rename(path)
    return tensors


class ShardedWriter:
    """Writes tensors into files of limited size, with an index if there are several.

    Args:
        folder: exists.
        tensors: name -> a meta tensor, of all tensors in the order of the files.
        largest: bytes of the largest file, or as "5GB"; a larger tensor gets a file of its own.
        total_parameters: of the model, for the index.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], largest: int | str, total_parameters: int
    ) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        self._folder, self._tensors = folder, tensors
        pattern = WEIGHTS_FILE.replace(".safetensors", "{suffix}.safetensors")
        split = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern=pattern, max_shard_size=largest
        )
        self.file_of = split.tensor_to_filename
        self._names = split.filename_to_tensors
        self._left = {file: set(names) for file, names in self._names.items()}
        self._open: dict[str, SafetensorsWriter] = {}
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": total_parameters, **split.metadata},
                "weight_map": self.file_of,
            }
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / INDEX_FILE).write_text(f"{text}\n")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; its file is closed with its last tensor."""
        file = self.file_of[name]
        if file not in self._open:
            own = {name: self._tensors[name] for name in self._names[file]}
            self._open[file] = SafetensorsWriter(self._folder / file, own)
        self._open[file].write(name, tensor)
        self._left[file].discard(name)
        if not self._left[file]:
            self._open.pop(file).close()

    def __enter__(self) -> "ShardedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for writer in self._open.values():
            writer.abort()
        missing = [name for names in self._left.values() for name in names]
        assert kind is not None or not missing, f"not written: {missing[:3]}"


class SafetensorsWriter:
    """Writes one file; the tensors come in any order.

    Args:
        tensors: name -> a meta tensor, for all tensors that will be written.

    Source: the format's description in the README of github.com/huggingface/safetensors: the
    length of the header (8 bytes), the header (JSON), the data of all tensors without gaps.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._missing = dict(tensors)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # Large elements first, so that all of them are aligned, as in safetensors' own files.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            tensor, start = tensors[name], end
            end += tensor.numel() * tensor.element_size()
            self._starts[name] = start
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(data)) + data)
        self._data_start = self._file.tell()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        expected = self._missing.pop(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
        self._file.seek(self._data_start + self._starts[name])
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def close(self) -> None:
        """Close the complete file."""
        assert not self._missing, f"{self._path} lacks {list(self._missing)[:3]}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
