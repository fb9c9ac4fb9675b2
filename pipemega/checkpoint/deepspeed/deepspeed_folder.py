"""The files of a checkpoint that DeepSpeed wrote.

    FOLDER/latest                                          a text file: the tag
    FOLDER/<tag>/layer_XX-model_YY-model_states.pt         weights of layer XX; tensor rank YY
    FOLDER/<tag>/mp_rank_MM_model_states.pt                weights of a model without a pipeline;
                                                           with one only the state of the run
    FOLDER/<tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   ZeRO: part D of the optimizer
    FOLDER/<tag>/zero/<name>/fp32.pt                       universal checkpoint

MM numbers the pipeline and tensor ranks; the tensor rank changes fastest. Without a tensor axis
`-model_YY` is missing.

Reads files of `torch.save` with `weights_only`; objects of unknown classes are left out.

DeepSpeed stores objects beside the tensors: loss scalers, argparse's namespace, objects of the
user's `client_state`. torch refuses such a file as a whole. Here each unknown class is replaced by
`LeftOut`, an object without code, so that no module is imported and nothing of the file runs.

DeepSpeed's names of parameters -> logical names.

pipeline    3.norm.weight              layers.3.norm.weight
module      encoder.norm.weight        layers.0.encoder.norm.weight
tied        tied_modules.embed.weight  needs a rule: the files do not say the position

StoredTensor: a logical tensor as pieces of the tensors in files, without a copy.
"""

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from pipemega.checkpoint.tensors import (
    LARGEST_CHUNK,
    LocalChunks,
    OutgoingShard,
    TensorShard,
    chunks_of_range,
)
from pipemega.errors import CheckpointError, short_cause
from pipemega.printing import listed

_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGE_3 = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_UNIVERSAL, _FP32 = "zero", "fp32.pt"
_POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True)
class DeepSpeedFolder:
    """The files of one checkpoint.

    Args:
        path: the path of the checkpoint.
        layers: position of the layer -> file of each tensor rank.
        models: file of each model-parallel rank, in order.
        optimizers: model-parallel rank -> file of each data rank.
        universal: name of a parameter -> its file.
    """

    path: Path
    layers: dict[int, list[Path]] = field(default_factory=dict)
    models: list[Path] = field(default_factory=list)
    optimizers: dict[int, list[Path]] = field(default_factory=dict)
    universal: dict[str, Path] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return self.path.name


def find_deepspeed(folder: str | Path, tag: str | None = None) -> Path | None:
    """Return the path of a checkpoint of DeepSpeed; None if the folder has none.

    Args:
        folder: a folder of checkpoints, or one checkpoint.
        tag: the checkpoint in the folder; None: the one that `latest` names.

    Raises:
        CheckpointError: `latest` names none of the folder's checkpoints.
    """
    folder = Path(folder)
    if tag is not None:
        return folder / tag if _has_files(folder / tag) else None
    pointer = next((folder / name for name in _POINTERS if (folder / name).is_file()), None)
    if pointer is not None:
        # If it names a checkpoint of pipemega, a run has continued in this folder.
        tag = pointer.read_text(errors="replace").strip()
        if not (folder / tag).exists() and (found := other_tags(folder)):
            raise CheckpointError(
                f"{pointer} names '{tag}', which is missing; {folder} contains {', '.join(found)}: "
                f"name one of them as the tag"
            )
        return folder / tag if _has_files(folder / tag) else None
    return folder if _has_files(folder) else None


def other_tags(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if _has_files(path))


def list_files(path: Path) -> DeepSpeedFolder:
    """Return the files of the checkpoint `path`.

    Raises:
        CheckpointError: a file is missing, or the checkpoint is of a kind whose weights cannot be
            read: ZeRO stage 3, mixture of experts.
    """
    names = sorted(p.name for p in path.iterdir())
    _refuse_others(path, names)
    models = {int(m[1]): path / m[0] for name in names if (m := _MODEL.fullmatch(name))}
    _check_numbers(path, "mp_rank_{:02d}_model_states.pt".format, models)
    layers = _grouped(path, _numbered(_LAYER, names), "layer_{:02d}-model_{:02d}-model_states.pt")
    parts = {(rank, data): name for (data, rank), name in _numbered(_OPTIMIZER, names).items()}
    optimizers = _grouped(path, parts, "zero_pp_rank_{1}_mp_rank_{0:02d}_optim_states.pt")
    if optimizers and len(optimizers) < len(models):
        pattern = "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt".format
        _check_numbers(path, pattern, {r: parts[0] for r, parts in optimizers.items()}, len(models))
    _check_universal(path)
    universal = {
        file.parent.relative_to(path / _UNIVERSAL).as_posix(): file
        for file in sorted((path / _UNIVERSAL).glob(f"**/{_FP32}"))
    }
    ordered = [models[rank] for rank in sorted(models)]
    return DeepSpeedFolder(path, layers, ordered, optimizers, universal)


def _check_universal(path: Path) -> None:
    # zero/optimizer_state.pt belongs to no parameter.
    folders = {file.parent for file in (path / _UNIVERSAL).glob("*/**/*.pt")}
    without = sorted(folder for folder in folders if not (folder / _FP32).is_file())
    if without or ((path / _UNIVERSAL).is_dir() and not folders):
        missing = without[0] / _FP32 if without else path / _UNIVERSAL / "<name>" / _FP32
        raise CheckpointError(
            f"{path} is incomplete: {missing.relative_to(path)} is missing: convert it again, or "
            f"copy all files"
        )


def _numbered(pattern: re.Pattern[str], names: Iterable[str]) -> dict[tuple[int, int], str]:
    """Return (first number, second number or 0) -> name."""
    found = (pattern.fullmatch(name) for name in names)
    return {(int(m[1]), int(m[2] or 0)): m[0] for m in found if m is not None}


def _grouped(
    path: Path, numbered: Mapping[tuple[int, int], str], pattern: str
) -> dict[int, list[Path]]:
    """Return first number -> files in the order of the second; all have equally many files."""
    size = 1 + max((second for _, second in numbered), default=0)
    found: dict[int, list[Path]] = {}
    for first in sorted({first for first, _ in numbered}):
        files = {second: path / name for (one, second), name in numbered.items() if one == first}
        _check_numbers(path, partial(pattern.format, first), files, size)
        found[first] = [files[second] for second in sorted(files)]
    return found


def _has_files(path: Path) -> bool:
    if not path.is_dir():
        return False
    if (path / _UNIVERSAL).is_dir():
        return True
    patterns = (_LAYER, _MODEL, _STAGE_3)
    return any(pattern.fullmatch(p.name) for p in path.iterdir() for pattern in patterns)


def _refuse_others(path: Path, names: list[str]) -> None:
    expert = next((name for name in names if "_expert_" in name), None)
    if expert is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of a mixture of experts ({expert}), and pipemega has no "
            f"expert layers: its weights cannot be imported"
        )
    stage_3 = next((name for name in names if _STAGE_3.fullmatch(name)), None)
    if stage_3 is not None and not (path / _UNIVERSAL).is_dir():
        raise CheckpointError(
            f"{path} was saved with ZeRO stage 3 ({stage_3}), whose files have parts of flattened "
            f"parameters: convert it with DeepSpeed's ds_to_universal.py, and import the result"
        )


def _check_numbers(
    path: Path, name: Callable[[int], str], found: Mapping[int, Path], size: int | None = None
) -> None:
    """Refuse a gap in the numbers 0, 1, 2 ...

    Args:
        name: number -> name of the file.
        size: how many there must be; None: as many as the largest number says.
    """
    size = 1 + max(found, default=-1) if size is None else size
    missing = [name(number) for number in range(size) if number not in found]
    if missing:
        raise CheckpointError(
            f"{path} is incomplete: {missing[0]} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ": copy all files of the checkpoint"
        )


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


_LOGICAL = re.compile(r"layers\.\d+\..+")
_NUMBERED = re.compile(r"\d+\..+")


@dataclass(frozen=True)
class NameRules:
    """Translates names; the first rule that matches applies.

    Args:
        rules: regular expression that matches a whole name of DeepSpeed -> its replacement, with
            groups as \\1; None: leave the tensor out.
    """

    rules: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, replacement in self.rules.items():
            try:
                re.sub(pattern, replacement or "", "")
            except (re.error, IndexError) as error:
                raise CheckpointError(
                    f"the name rule {pattern!r} -> {replacement!r} is not valid: {error}"
                ) from error

    def translate(self, names: Iterable[str], kind: str) -> dict[str, str]:
        """Return DeepSpeed's name -> logical name, without the tensors that are left out.

        Args:
            kind: the kind of checkpoint: "pipeline", "module" or "universal".

        Raises:
            CheckpointError: a name has no position, two names become one, or a rule matches none.
        """
        names = list(names)
        numbered = kind == "pipeline" or (kind == "universal" and any(map(_is_of_pipeline, names)))
        used: set[str] = set()
        found: dict[str, str] = {}
        for name in names:
            logical = self._translate(name, numbered, used)
            if logical is not None:
                found[name] = logical
        unused = [pattern for pattern in self.rules if pattern not in used]
        if unused:
            raise CheckpointError(
                f"the name rule {unused[0]!r} matches no name of the checkpoint; it has: "
                f"{listed(names, 3)}"
            )
        _check(found)
        return found

    def _translate(self, name: str, numbered: bool, used: set[str]) -> str | None:
        for pattern, replacement in self.rules.items():
            if re.fullmatch(pattern, name):
                used.add(pattern)
                return None if replacement is None else re.sub(f"^{pattern}$", replacement, name)
        if not numbered:
            return f"layers.0.{name}"
        return f"layers.{name}" if _NUMBERED.fullmatch(name) else name


def _is_of_pipeline(name: str) -> bool:
    return _NUMBERED.fullmatch(name) is not None or name.startswith("tied_modules.")


def _check(found: Mapping[str, str]) -> None:
    wrong = [name for name, logical in found.items() if not _LOGICAL.fullmatch(logical)]
    if wrong:
        name = wrong[0]
        tied = re.match(r"tied_modules\.([^.]+)\.", name)
        pattern, position = (
            (rf"tied_modules\.{tied[1]}\.(.+)", "layers.POSITION.\\1")
            if tied
            else (re.escape(name), "layers.POSITION.NAME")
        )
        what = f"is a tied layer (key {tied[1]!r})" if tied else f"became '{found[name]}'"
        raise CheckpointError(
            f"the position of '{name}' in the pipeline is not known: it {what}, and a logical name "
            f"is layers.<position>.<name in the layer>. Add a rule with the position of its first "
            f"layer: --name '{pattern}={position}'"
        )
    sources: dict[str, str] = {}
    for name, logical in found.items():
        other = sources.setdefault(logical, name)
        if other != name:
            raise CheckpointError(
                f"'{other}' and '{name}' both become '{logical}': change the name rules"
            )


Piece = tuple[tuple[int, ...], Tensor]
"""Offsets in the logical tensor, and the values there."""
Segment = tuple[int, int, int]
"""Along one dim: start in the part, length, start in the logical tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` whose values are in `pieces`, which fill it and do not overlap.

    Args:
        parts: how many parts a tensor-parallel shard consists of, such as 3 for queries, keys and
            values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    parts: int = 1

    @classmethod
    def whole(cls, tensor: Tensor) -> "StoredTensor":
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, ((tuple(0 for _ in shape), tensor.detach()),))

    @classmethod
    def of_flat(cls, shape: Sequence[int], flat: Iterable[Tensor]) -> "StoredTensor":
        """Return a tensor that is filled row by row with the elements of the flat tensors."""
        pieces: list[Piece] = []
        start, dtype = 0, torch.float32
        for part in flat:
            dtype = part.dtype
            used = 0
            for offsets, sizes in chunks_of_range(shape, start, start + part.numel()):
                length = torch.Size(sizes).numel()
                pieces.append((offsets, part.narrow(0, used, length).view(sizes)))
                used += length
            start += part.numel()
        return cls(tuple(shape), dtype, tuple(pieces))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def placed(self, dim: int, segments: Iterable[Segment]) -> list[Piece]:
        """Return the pieces at their place in a larger tensor, of which this is a part."""
        found: list[Piece] = []
        for start, length, logical in segments:
            for offsets, values in self.pieces:
                low, high = offsets[dim], offsets[dim] + values.shape[dim]
                first, last = max(low, start), min(high, start + length)
                if first < last:
                    at = (*offsets[:dim], logical + first - start, *offsets[dim + 1 :])
                    found.append((at, values.narrow(dim, first - low, last - first)))
        return found

    def first_rows(self, rows: int) -> "StoredTensor":
        """Return the tensor without the rows after the first `rows`."""
        pieces = self.placed(0, [(0, rows, 0)])
        return replace(self, shape=(rows, *self.shape[1:]), pieces=tuple(pieces))

    def reshaped(self, shape: Sequence[int]) -> "StoredTensor":
        """Return a flat tensor with another shape of as many elements."""
        return self.of_flat(shape, [self.full()])

    def full(self) -> Tensor:
        """Return the values in one tensor."""
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        found = torch.empty(self.shape, dtype=self.dtype)
        for offsets, values in self.pieces:
            _region(found, offsets, values.shape).copy_(values)
        return found

    def equals(self, other: "StoredTensor") -> bool:
        """Return whether the values, cast to the dtype of `other`, equal the values of `other`."""
        if self.shape != other.shape:
            return False
        full = other.full()
        return all(
            torch.equal(values.to(full.dtype), _region(full, offsets, values.shape))
            for offsets, values in self.pieces
        )

    def outgoing(self) -> OutgoingShard:
        """Return chunks of at most `LARGEST_CHUNK` bytes, to write into a checkpoint."""
        chunks: LocalChunks = {}
        for offsets, values in self.pieces:
            # [] for a number.
            row = values[0].nbytes if values.dim() and len(values) else values.nbytes
            rows = max(1, LARGEST_CHUNK // max(1, row))
            for start in range(0, len(values), rows) if values.dim() else (0,):
                part = values[start : start + rows] if values.dim() else values
                at = torch.Size((offsets[0] + start, *offsets[1:]) if offsets else ())
                chunks[at] = part
        return OutgoingShard(torch.Size(self.shape), chunks)

    @torch.no_grad()
    def copy_into(self, shard: TensorShard) -> None:
        """Fill this rank's shard of the tensor."""
        for wanted, into in shard.incoming.items():
            for offsets, values in self.pieces:
                low = [max(pair) for pair in zip(wanted, offsets, strict=True)]
                ends = zip(wanted, into.shape, offsets, values.shape, strict=True)
                high = [min(a + n, b + m) for a, n, b, m in ends]
                sizes = [max(0, last - first) for first, last in zip(low, high, strict=True)]
                if all(sizes):
                    target = _region(into, [a - b for a, b in zip(low, wanted, strict=True)], sizes)
                    target.copy_(
                        _region(values, [a - b for a, b in zip(low, offsets, strict=True)], sizes)
                    )


def _region(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
