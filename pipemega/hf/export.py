"""Export a checkpoint as a folder that `from_pretrained` of transformers loads.

    checkpoint    logical tensors, of any mesh, read one by one
    model         transformers' names; cast, and transposed where transformers stores it so
    folder        the hub's names, by transformers' own conversions, in files of limited size

One process streams: in memory are only tensors that are converted together.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.dcp_storage import ShardReader
from pipemega.errors import CheckpointError
from pipemega.hf.export_plan import ExportPlan
from pipemega.hf.folder_files import copy_tokenizer, write_configs
from pipemega.hf.fp32_parameters import stays_fp32
from pipemega.hf.safetensors_files import listed
from pipemega.hf.safetensors_writer import ShardedWriter
from pipemega.hf.whole_model import whole_model

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
        dtype: of floating-point tensors; None: that of the checkpoint.
        max_shard_size: of the largest file, in bytes or as "5GB".
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
        dtype: of most of them.
        num_files: safetensors files.
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
