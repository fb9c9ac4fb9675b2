"""The files of a checkpoint that DeepSpeed wrote.

    FOLDER/latest                                          a text file: the tag
    FOLDER/<tag>/layer_XX-model_YY-model_states.pt         weights of layer XX; tensor rank YY
    FOLDER/<tag>/mp_rank_MM_model_states.pt                weights of a model without a pipeline;
                                                           with one only the state of the run
    FOLDER/<tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   ZeRO: part D of the optimizer
    FOLDER/<tag>/zero/<name>/fp32.pt                       universal checkpoint

MM numbers the pipeline and tensor ranks; the tensor rank changes fastest. Without a tensor axis
`-model_YY` is missing.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipemega.errors import CheckpointError

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
        path: of the checkpoint.
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
