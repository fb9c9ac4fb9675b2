"""Export a checkpoint as a folder that `from_pretrained` of transformers loads.

    checkpoint    logical tensors, of any mesh, read one by one
    model         transformers' names; cast, and transposed where transformers stores it so
    folder        the hub's names, by transformers' own conversions, in files of limited size

One process streams: in memory are only tensors that are converted together.

ExportPlan: the tensors of an exported folder, and which tensors are converted together.

Write safetensors files tensor by tensor; no file is in memory as a whole.

safetensors' own `save_file` needs all tensors of a file at once. Its package is not used here.

The small files of a folder: config, generation config, tokenizer, preprocessor.
"""

import json
import os
import re
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.dcp_storage import ShardReader
from pipemega.checkpoint.save_load import CheckpointReader
from pipemega.errors import CheckpointError
from pipemega.hf.placeholders import whole_model
from pipemega.hf.weights.safetensors_files import (
    DTYPES,
    INDEX_FILE,
    WEIGHTS_FILE,
    listed,
    stays_fp32,
)


class ExportPlan:
    """What the tensors of a model become in the folder; all without values.

    Args:
        model: the whole model of transformers, on the meta device.
        tensors: name in the model -> meta tensor in the dtype of the export.

    Attributes:
        hub: name in the folder -> meta tensor, in HF's order.
        groups: names in the model that are converted together, in HF's order.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        # New tensors: the converted tensors can be views of larger ones.
        self.hub = {
            name: torch.empty(made.shape, dtype=made.dtype, device="meta")
            for name, made in self.convert(tensors).items()
        }
        self._separable: dict[str, bool] = {}
        self.groups = list(self._groups(tensors))

    @property
    def size(self) -> int:
        """Bytes of all tensors in the folder."""
        return sum(tensor.nbytes for tensor in self.hub.values())

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names and in the shapes of the hub."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return converted

    def _groups(self, tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Yield groups: single tensors where possible, else tensors of one layer."""
        layers: dict[str, list[str]] = defaultdict(list)
        numbers = count()
        for name in tensors:
            # A tensor outside of the layers is never converted with others.
            layer = re.match(r".*?\.\d+\.", name)
            layers[layer.group() if layer else f"{next(numbers)}"].append(name)
        for names in layers.values():
            together = [name for name in names if not self._is_separable(name, tensors[name])]
            if together:
                yield together
            for name in names:
                if name not in together:
                    yield [name]

    def _is_separable(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor that is converted alone becomes what it should."""
        # Layers of one kind have the same rules.
        kind = re.sub(r"\d+", "0", name) + str(tuple(tensor.shape))
        if kind not in self._separable:
            try:
                alone = self.convert({name: tensor})
            # An operation that needs several tensors fails with any exception.
            except Exception:
                alone = {}
            self._separable[kind] = bool(alone) and all(
                key in self.hub and self.hub[key].shape == made.shape for key, made in alone.items()
            )
        return self._separable[kind]


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_tensors(reader: CheckpointReader, path: Path) -> dict[str, Tensor]:
    """Write the parameters and buffers of a checkpoint of any model, unsharded, to one file.

    The tensors have the dtypes of the checkpoint: fp32 master weights for bf16 and fp16 runs.

    Args:
        path: path of the new file, which appears when it is complete.

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
        folder: an existing folder.
        tensors: name -> a meta tensor, of all tensors in the order of the files.
        largest: bytes of the largest file, or as "5GB"; a larger tensor gets a file of its own.
        total_parameters: number of parameters of the model, for the index.
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


GENERATION_CONFIG = "generation_config.json"

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
)


def write_configs(model: Any, dtype: torch.dtype, folder: Path, source: Path | None) -> None:
    """Write config.json, and generation_config.json for a model that generates.

    Args:
        dtype: the dtype of the weights.
        source: a folder whose generation config is copied, if it has one.
    """
    config = deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if source is not None and (source / GENERATION_CONFIG).is_file():
        shutil.copy(source / GENERATION_CONFIG, folder)
    elif model.can_generate():
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the files of tokenizer and preprocessor; return their names."""
    copied = []
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy(path, folder)
            copied.append(path.name)
    return copied


# For the configs and the tokenizer, and because file systems need some space themselves.
_SPARE_BYTES = 64 << 20


StartProgress = Callable[[int], Callable[[int], object]]
"""Called with the number of all bytes; returns what is called with the bytes of each tensor."""


@dataclass(frozen=True)
class CheckpointTensor:
    """Where a tensor of the transformers model is in a checkpoint.

    Args:
        key: "parameters/..." or "buffers/...".
        rows: [start, stop) of its rows in that tensor; None: all.
        transposed: transformers stores the transpose.
    """

    key: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class ModelToExport:
    """The model in a checkpoint as a model of transformers.

    Args:
        config: the `PretrainedConfig`.
        class_name: the class of transformers.
        tensors: name in the state_dict of the class -> where it is in the checkpoint.
        change: changes (a part of) a tensor of the checkpoint before it is transposed and cast.
    """

    config: Any
    class_name: str
    tensors: Mapping[str, CheckpointTensor]
    change: Callable[[CheckpointTensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Args:
        dtype: the dtype of floating-point tensors; None: the dtypes of the checkpoint.
        max_shard_size: size of the largest file, in bytes or as "5GB".
        source: folder whose tokenizer and generation config are copied.
        start: shows the progress.
    """

    dtype: torch.dtype | None = None
    max_shard_size: int | str = "5GB"
    source: Path | None = None
    start: StartProgress | None = None


@dataclass(frozen=True)
class ExportSummary:
    """What was written.

    Args:
        size: bytes of all tensors.
        dtype: the dtype of most parameters.
        num_files: number of safetensors files.
        tokenizer: the copied files of tokenizer and preprocessor.
    """

    class_name: str
    size: int
    dtype: torch.dtype
    num_files: int
    tokenizer: tuple[str, ...]


def export(
    reader: ShardReader, exported: ModelToExport, folder: Path, options: ExportOptions
) -> ExportSummary:
    """Write the folder, which appears when it is complete.

    Raises:
        CheckpointError: the folder exists, the disk is too small, or the checkpoint has other
            tensors than the model.
    """
    refuse_existing(folder)
    model = whole_model(exported.config, exported.class_name)
    tensors = _tensors_of(model, reader, exported, options.dtype)
    plan = ExportPlan(model, tensors)
    _check_free_space(folder, plan.size)
    temporary = folder.absolute().with_name(f".{folder.absolute().name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        written = options.start(plan.size) if options.start is not None else None
        total = model.num_parameters()
        with ShardedWriter(temporary, plan.hub, options.max_shard_size, total) as writer:
            for group in plan.groups:
                part = {name: _read(reader, exported, name, tensors[name]) for name in group}
                for name, tensor in plan.convert(part).items():
                    writer.write(name, tensor)
                    if written is not None:
                        written(tensor.nbytes)
        dtype, source = _dtype_of(tensors), options.source
        write_configs(model, dtype, temporary, source)
        copied = copy_tokenizer(source, temporary) if source is not None else ()
        if folder.exists():
            # Empty, as checked above; another process may have filled it.
            folder.rmdir()
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    num_files = len(set(writer.file_of.values()))
    return ExportSummary(exported.class_name, plan.size, dtype, num_files, tuple(copied))


def refuse_existing(folder: Path) -> None:
    """Refuse a folder that is not new or empty.

    Raises:
        CheckpointError: it exists.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty: name a new folder, or delete it")


def _tensors_of(
    model: Any, reader: ShardReader, exported: ModelToExport, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return a meta tensor for each name that transformers saves, in its order.

    Raises:
        CheckpointError: lists the names or shapes that differ.
    """
    stored = reader.tensors
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    ignored = set(model._keys_to_ignore_on_save or ()) | tied
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in ignored}
    found, wrong = {}, []
    for name, shape in expected.items():
        place = exported.tensors.get(name)
        if place is None or place.key not in stored:
            wrong.append(f"{name} {list(shape)} is not in the checkpoint")
            continue
        have, stored_dtype = stored[place.key]
        if place.rows is not None:
            have = (place.rows[1] - place.rows[0], *have[1:])
        have = have[::-1] if place.transposed else have
        if have != shape:
            wrong.append(f"{name} is {list(have)} in the checkpoint and {list(shape)} in the model")
        found[name] = torch.empty(
            shape, dtype=_export_dtype(model, name, stored_dtype, dtype), device="meta"
        )
    extra = [n for n in exported.tensors if n not in expected and n not in ignored]
    wrong += [f"the model has no {name}" for name in extra]
    if wrong:
        raise CheckpointError(
            f"the checkpoint has other tensors than a {exported.class_name} of its config: "
            f"{listed(wrong)}"
        )
    return found


def _export_dtype(
    model: Any, name: str, stored: torch.dtype, dtype: torch.dtype | None
) -> torch.dtype:
    if dtype is None or not stored.is_floating_point:
        return stored
    # transformers loads these in fp32 from a folder in half precision, and saves them so.
    return torch.float32 if stays_fp32(model, name, dtype) else dtype


def _dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of most parameters."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _read(reader: ShardReader, exported: ModelToExport, name: str, like: Tensor) -> Tensor:
    place = exported.tensors[name]
    tensor = reader.read_full(place.key, place.rows)
    if exported.change is not None:
        tensor = exported.change(place, tensor)
    return (tensor.T if place.transposed else tensor).to(like.dtype)


def _check_free_space(folder: Path, size: int) -> None:
    absolute = folder.absolute()
    existing = next(path for path in absolute.parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size + _SPARE_BYTES:
        raise CheckpointError(
            f"the export needs {(size + _SPARE_BYTES) / 1e9:.2f} GB, and {existing} has "
            f"{free / 1e9:.2f} GB free: free some space, or export with a smaller --dtype"
        )
