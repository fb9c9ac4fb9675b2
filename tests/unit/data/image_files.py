"""Small files of images: CIFAR's formats and folders."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

NAMES = {"cifar10": 10, "cifar100": 100}


def cifar_images(kind: str, count: int, seed: int) -> tuple[Bytes, list[int]]:
    """Return pixels [count, 3072] and labels; every class up to `count` is there."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, [(seed + index) % NAMES[kind] for index in range(count)]


def write_cifar(folder: Path, kind: str, form: str, *, count: int = 4) -> Path:
    """Write all files of a data set in `form` "python" or "binary", with `count` images each."""
    folder.mkdir(parents=True)
    train = [f"data_batch_{n}" for n in range(1, 6)] if kind == "cifar10" else ["train"]
    test = "test_batch" if kind == "cifar10" else "test"
    for seed, name in enumerate([*train, test]):
        pixels, labels = cifar_images(kind, count, seed)
        if form == "python":
            key = b"labels" if kind == "cifar10" else b"fine_labels"
            dump(folder / name, {b"batch_label": b"x", key: labels, b"data": pixels})
        else:
            group = [[0]] * count if kind == "cifar100" else [[]] * count
            rows = [bytes([*g, label]) + row.tobytes() for g, label, row in
                    zip(group, labels, pixels, strict=True)]  # fmt: skip
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
    words = [f"class{index}" for index in range(NAMES[kind])]
    if form == "binary":
        text = "batches.meta.txt" if kind == "cifar10" else "fine_label_names.txt"
        (folder / text).write_text("\n".join(words))
    else:
        name, key = ("batches.meta", b"label_names") if kind == "cifar10" else (
            "meta", b"fine_label_names"
        )  # fmt: skip
        dump(folder / name, {key: [word.encode() for word in words]})
    return folder


def dump(path: Path, content: Any) -> None:
    """Pickle `content` in the protocol of the published files."""
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_folder(folder: Path, classes: dict[str, int], size: tuple[int, int] = (12, 10)) -> Path:
    """Write `classes`: name -> number of PNG files, each of one colour, size (width, height)."""
    from PIL import Image

    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            colour = (40 * number + 10, 200 - 20 * index, 7)
            Image.new("RGB", size, colour).save(folder / name / f"{index}.png")
    return folder
