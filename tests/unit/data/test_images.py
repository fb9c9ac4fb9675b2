"""`data.images`: CIFAR's files, folders, digits; transforms, mixup and their seeds."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipemega.cli import main
from pipemega.config import load
from pipemega.config.sections.data_section import DataSection
from pipemega.data.images.image_dataset import ImageDataset, build_images
from pipemega.data.images.image_files import ArrayPixels, LabelledImages
from pipemega.data.loader import BatchLoader, LoaderOptions
from pipemega.data.sample_reader import Share
from pipemega.data.tokens.data_files import check_data_inputs
from pipemega.errors import ConfigError, DataError, PipemegaError
from tests.optional_packages import imported
from tests.unit.data.image_files import cifar_images, dump, write_cifar, write_folder

pytest.importorskip("PIL")

ROOT = Path(__file__).parents[3]
BOTH = ("train", "valid")


def section(**keys: Any) -> DataSection:
    return load({"train_batch_size": 1, "data": keys}).data


def built(
    *, shape: tuple[int, int, int] = (3, 8, 8), splits: tuple[str, ...] = BOTH, **keys: Any
) -> dict[str, ImageDataset]:
    found = build_images(section(**keys), shape, None, splits)
    by_name = {name: getattr(found, name) for name in ("train", "valid", "test")}
    return {name: dataset for name, dataset in by_name.items() if dataset is not None}


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifars_files_are_read_as_they_are_published(tmp_path: Path, kind: str, form: str) -> None:
    inside = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[form]
    if kind == "cifar100":
        inside = f"cifar-100-{form}"
    write_cifar(tmp_path / inside, kind, form)
    raw = {"mean": [0.0] * 3, "std": [1.0] * 3}
    found = built(images=kind, path=str(tmp_path), transforms=raw, shape=(3, 32, 32))
    assert {name: len(dataset) for name, dataset in found.items()} == {
        "train": 20 if kind == "cifar10" else 4, "valid": 4,
    }  # fmt: skip
    pixels, labels = cifar_images(kind, 4, seed=5 if kind == "cifar10" else 1)
    for index in range(4):
        image, label = found["valid"][index]
        assert torch.equal(image, torch.from_numpy(pixels[index].reshape(3, 32, 32)) / 255)
        assert label == labels[index]
    assert found["valid"].classes[3] == "class3"


class _RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran-code",)


def test_a_cifar_file_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_cifar(tmp_path / "c", "cifar10", "python")
    dump(folder / "data_batch_2", {b"labels": [0], b"data": _RunsCode()})
    message = r"data_batch_2 is not a file of CIFAR's Python version.*it contains posix.mkdir"
    with pytest.raises(DataError, match=message):
        built(images="cifar10", path=str(folder))
    assert not (tmp_path / "ran-code").exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_cifar_files_may_have_any_protocol_of_pickle(tmp_path: Path, protocol: int) -> None:
    folder = write_cifar(tmp_path / "c", "cifar100", "python")
    pixels, labels = cifar_images("cifar100", 3, seed=9)
    content = {b"fine_labels": np.array(labels), b"data": pixels}
    (folder / "test").write_bytes(pickle.dumps(content, protocol=protocol))
    assert [y for _, y in built(images="cifar100", path=str(folder))["valid"]] == labels  # type: ignore[attr-defined]


def _change(name: str, content: bytes | dict[bytes, Any] | None) -> Any:
    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            dump(folder / name, content)

    return change


IMAGE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("python", _change("test_batch", None), r"lacks test_batch of CIFAR-10: unpack the whole"),
        ("python", _change("test_batch", b"x"), r"test_batch is not a file of CIFAR's Python"),
        (
            "python",
            _change("data_batch_1", {b"fine_labels": [1], b"data": IMAGE}),
            r"data_batch_1 is not a file of CIFAR-10: it has the keys .*fine_labels.*; exp.* b'la",
        ),
        (
            "python",
            _change("data_batch_1", {b"labels": [1, 2], b"data": IMAGE}),
            r"it has 1 images and 2 labels",
        ),
        (
            "python",
            _change("data_batch_1", {b"labels": [11], b"data": IMAGE}),
            r"it has labels from 11 to 11, and 10 classes",
        ),
        (
            "python",
            _change("data_batch_1", {b"labels": [1], b"data": IMAGE[:, :3000]}),
            r"its images are uint8 \[1, 3000\]",
        ),
        (
            "binary",
            _change("test_batch.bin", b"12345"),
            r"test_batch.bin is not a file of CIFAR-10: it has 5 bytes, which are no multiple of "
            r"3,073",
        ),
    ],
)
def test_a_wrong_cifar_file_is_named(tmp_path: Path, form: str, change: Any, message: str) -> None:
    change(write_cifar(tmp_path / "c", "cifar10", form))
    with pytest.raises(DataError, match=message):
        built(images="cifar10", path=str(tmp_path / "c"))


def test_a_folder_without_cifar_says_which_files_are_missing(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-100-python", "cifar100", "python")
    with pytest.raises(DataError, match=r"has no files of CIFAR-10 \(data_batch_1 or data_batch_1"):
        built(images="cifar10", path=str(tmp_path))


def test_a_folder_has_a_class_per_sub_folder_and_may_have_train_and_val(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    write_folder(tmp_path / "val", {"dog": 1, "cat": 1})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    found = built(images="folder", path=str(tmp_path))
    assert found["train"].classes == ("cat", "dog")
    assert [found["train"][i][1] for i in range(5)] == [0, 0, 0, 1, 1]
    assert sorted(found["valid"][i][1] for i in range(2)) == [0, 1]
    assert "train: 5 images of 2 classes" in found["train"].describe()


def test_validation_images_are_cut_off_class_by_class_always_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 10, "b": 5})
    found = built(images="folder", path=str(tmp_path), split="80,20,0")
    labels = {name: sorted(d[i][1] for i in range(len(d))) for name, d in found.items()}
    assert labels == {"train": [0] * 8 + [1] * 4, "valid": [0, 0, 1]}
    again = built(images="folder", path=str(tmp_path), split="80,20,0")
    assert again["valid"].fingerprint == found["valid"].fingerprint
    names = [{d.source.pixels.files[i] for i in d._chosen} for d in found.values()]  # type: ignore[attr-defined]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("train", "valid", "keys", "message"),
    [
        ({}, None, {}, r"data.path: .* has no images: it needs a sub-folder per class"),
        ({"a": 1, "b": 0}, None, {}, r"data.path: .* has no images of class 'b': add files .bmp"),
        (
            {"a": 2, "b": 2},
            {"a": 1},
            {},
            r"data.valid_path: .* has no sub-folder for class 'b' of .*train: validation "
            r"needs images of every class",
        ),
        (
            {"a": 2, "b": 2},
            {"a": 1, "b": 1, "c": 1, "d": 1},
            {},
            r"data.valid_path: .* has 2 classes \('c', 'd'\), and .*train has no such sub-folder",
        ),
        (
            {"a": 9, "b": 2},
            None,
            {"split": "80,20,0"},
            r"class 'b' of .* has 2 images, of which data.split \('80,20,0'\) leaves none for "
            r"validation: change data.split, set data.valid_path, or add images",
        ),
    ],
)
def test_a_class_without_images_is_named(
    tmp_path: Path, train: Any, valid: Any, keys: Any, message: str
) -> None:
    (tmp_path / "train").mkdir()
    write_folder(tmp_path / "train", train)
    if valid:
        keys = {**keys, "valid_path": str(write_folder(tmp_path / "v", valid))}
    with pytest.raises(DataError, match=message):
        built(images="folder", path=str(tmp_path / "train"), **keys)


def test_the_check_of_the_files_names_a_class_without_images(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_folder(tmp_path / name, {"a": 1, "b": 1})
    check_data_inputs(section(images="folder", path=str(tmp_path)))
    (tmp_path / "val" / "b" / "0.png").unlink()
    with pytest.raises(DataError, match=r"data.path: .*val has no images of class 'b': add files"):
        check_data_inputs(section(images="folder", path=str(tmp_path)))
    other = str(tmp_path / "train")
    check_data_inputs(section(images="folder", path=str(tmp_path), valid_path=other))


def test_check_compares_the_classes_of_a_folder_with_those_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, {"a": 2, "b": 2, "c": 2})
    words = ["check", str(ROOT / "configs/vit_digits.json"), "--set", "data.images=folder"]
    words += ["--set", f"data.path={tmp_path}", "--set", "model.num_channels=3"]
    assert main(words) == 0
    assert "exists, 3 classes" in capsys.readouterr().out
    assert main([*words, "--set", "model.num_classes=2"]) == 1
    message = "model.num_classes is 2, and data.path has 3 classes: set model.num_classes to 3"
    assert message in capsys.readouterr().err


def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1, "b": 1})
    good = (tmp_path / "b" / "0.png").read_bytes()
    for content in (b"no image", good[: len(good) // 2]):
        (tmp_path / "a" / "0.png").unlink(missing_ok=True)
        (tmp_path / "a" / "0.jpg").write_bytes(content)
        dataset = built(images="folder", path=str(tmp_path), splits=("train",))["train"]
        loader = BatchLoader(dataset, Share(2, 2), LoaderOptions(prefetch=0))
        message = r"a/0\.jpg cannot be read as an image \(.*\): repair the file, or remove it"
        with pytest.raises(DataError, match=message) as caught:
            loader.next_step()
        assert caught.value.__cause__ is None  # a worker process would add its traceback


@pytest.mark.parametrize("name", ["0.png", "0.tif", "0.pgm"])
def test_images_of_16_bits_are_scaled_to_8(tmp_path: Path, name: str) -> None:
    """Pillow's conversion to RGB clips them: almost all pixels were white."""
    from PIL import Image

    values = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / name)
    raw = {"mean": [0.0] * 3, "std": [1 / 255] * 3}
    keys = {"images": "folder", "path": str(tmp_path), "transforms": raw, "splits": ("train",)}
    image, _ = built(shape=(3, 4, 4), split="1,0,0", **keys)["train"][0]
    expected = torch.from_numpy(values // 256).float()
    torch.testing.assert_close(image, expected.expand(3, 4, 4))
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a" / "0.tif")
    other = built(shape=(3, 4, 4), split="1,0,0", **keys)["train"]
    at = other.source.pixels.files.index("a/0.tif")  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"0.tif cannot be .* values have 32 bits, and their range"):
        other.source.pixels[at]


def test_the_environment_variable_data_is_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(DataError, match=r"set data\.path, or the environment variable DATA"):
        check_data_inputs(section(images="folder"))
    monkeypatch.setenv("DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"environment variable DATA: the folder .*none does not"):
        check_data_inputs(section(images="folder"))
    monkeypatch.setenv("DATA", str(write_folder(tmp_path / "d", {"a": 2, "b": 2})))
    check_data_inputs(section(images="folder"))
    assert len(built(images="folder", splits=("train",))["train"]) == 4


def test_digits_are_those_of_scikit_learn_or_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    train = build_images(section(images="glyphs"), (1, 20, 20), None).train
    assert isinstance(train, ImageDataset)
    assert len(train.classes) == 10
    assert train[0][0].shape == (1, 20, 20)
    # The first images, which training.eval_steps may select, are of many classes.
    assert len({train[i][1] for i in range(40)}) > 5
    # The classes can be told apart: the mean images of two classes differ more than halves of one.
    images = torch.stack([train[i][0] for i in range(600)])
    labels = torch.tensor([train[i][1] for i in range(600)])
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(images.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == labels).float().mean() > 0.6
    monkeypatch.setitem(sys.modules, "sklearn", None)
    replaced = build_images(section(images="digits"), (1, 20, 20), None)
    assert "scikit-learn is not installed (pip install" in replaced.description[0]
    assert replaced.fingerprint == train.fingerprint  # type: ignore[union-attr]


def test_the_digits_of_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    found = built(images="digits", shape=(1, 8, 8), split="90,10,0")
    assert {name: len(d) for name, d in found.items()} == {"train": 1618, "valid": 179}


def of_array(*values: int, channels: int = 3, side: int = 4) -> LabelledImages:
    """Return images of one grey value each, with classes 0, 1, ..."""
    array = np.array(values, np.uint8)[:, None, None, None].repeat(channels, 1)
    array = array.repeat(side, 2).repeat(side, 3)
    classes = tuple(map(str, range(len(values))))
    return LabelledImages("greys", ArrayPixels(array), np.arange(len(values)), classes)


def dataset(source: LabelledImages, shape: Any, name: str = "train", **keys: Any) -> ImageDataset:
    transforms = section(images="glyphs", transforms=keys).transforms
    every = np.arange(len(source.labels))
    return ImageDataset(source, name, every, transforms, shape, len(source.classes))


def test_images_are_scaled_cut_and_normalized_for_the_model() -> None:
    rows = np.arange(8, dtype=np.uint8)[None, None, :, None].repeat(3, 1).repeat(4, 3)
    source = LabelledImages("rows", ArrayPixels(rows), np.zeros(1, np.int64), ("a",))
    plain = {"mean": [0.0] * 3, "std": [1 / 255] * 3}
    # 8 x 4 -> the centre 4 x 4.
    found = dataset(source, (3, 4, 4), **plain)[0][0]
    torch.testing.assert_close(found[0, :, 0], torch.arange(2.0, 6.0))
    # The shorter side is scaled to 4 / 0.5 = 8 pixels first.
    assert dataset(source, (3, 4, 4), center_crop=0.5, **plain)[0][0].shape == (3, 4, 4)
    grey = dataset(of_array(100), (1, 2, 2), mean=[0.5], std=[0.25])[0][0]
    torch.testing.assert_close(grey, torch.full((1, 2, 2), (100 / 255 - 0.5) / 0.25))
    colour = dataset(of_array(100, channels=1), (3, 6, 6), **plain)[0][0]
    torch.testing.assert_close(colour, torch.full((3, 6, 6), 100.0))


def test_only_training_images_have_random_changes() -> None:
    keys = {"random_crop": 2, "flip": True, "mixup": 1.0}
    source = of_array(200, 10)
    valid = dataset(source, (3, 4, 4), "valid", **keys)
    assert valid.deterministic
    assert valid[1][1] == 1
    train = dataset(source, (3, 4, 4), **keys)
    assert not train.deterministic
    assert any(not torch.equal(train[0][0], train[0][0]) for _ in range(5))


def test_a_random_crop_shifts_the_image_and_flip_mirrors_it() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(1, 3, 4, 4)
    source = LabelledImages("p", ArrayPixels(pixels), np.zeros(1, np.int64), ("a",))
    plain = {"mean": [0.0] * 3, "std": [1 / 255] * 3}
    stored = torch.from_numpy(pixels[0]).float()
    padded = torch.nn.functional.pad(stored, [1] * 4)
    shifts = [padded[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    torch.manual_seed(0)
    cropped, mirrored = (
        dataset(source, (3, 4, 4), **plain, **keys) for keys in ({"random_crop": 1}, {"flip": True})
    )
    seen = set()
    for _ in range(60):
        image = cropped[0][0].round()
        (at,) = [i for i, shift in enumerate(shifts) if torch.equal(shift, image)]
        seen.add(at)
    assert len(seen) == 9
    flips = [torch.equal(mirrored[0][0].round(), stored.flip(-1)) for _ in range(40)]
    assert 5 < sum(flips) < 35


def test_mixup_mixes_images_as_it_mixes_labels() -> None:
    keys = {"mean": [0.0] * 3, "std": [1 / 255] * 3, "mixup": 0.5}
    train = dataset(of_array(50, 250), (3, 4, 4), **keys)
    shares = set()
    for _ in range(20):
        image, label = train[0]
        assert isinstance(label, torch.Tensor)
        torch.testing.assert_close(label.sum(), torch.tensor(1.0))
        expected = 50 * label[0] + 250 * label[1]
        torch.testing.assert_close(image, expected.expand(3, 4, 4), rtol=0, atol=1e-3)
        shares.add(round(float(label[0]), 3))
    assert len(shares) > 5


KEYS = {"random_crop": 1, "flip": True, "mixup": 0.4}


def steps(train: Any, micro: int, ranks: int, start: int = 0, count: int = 3) -> list[Any]:
    """Return the samples of some steps of 4, in the order of the stream, from all data ranks."""
    shares = [Share(4, micro, rank, ranks) for rank in range(ranks)]
    options = LoaderOptions(prefetch=0, seed=3)
    loaders = [BatchLoader(train, s, options, consumed_samples=4 * start) for s in shares]
    found = []
    for _ in range(count):
        batches = zip(*(loader.next_step() for loader in loaders), strict=True)
        parts = [batch for of_ranks in batches for batch in of_ranks]
        found.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    return found


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (1, 4)])
def test_random_changes_are_equal_on_every_mesh_and_after_a_resume(micro: int, ranks: int) -> None:
    train = dataset(of_array(10, 60, 110, 160, 210, 250), (3, 4, 4), **KEYS)
    expected = steps(train, 4, 1)
    # A worker process gets a copy.
    again = pickle.loads(pickle.dumps(train))
    for start in (0, 1):
        found = steps(again, micro, ranks, start, 3 - start)
        for (x, y), (a, b) in zip(found, expected[start:], strict=True):
            assert torch.equal(x, a)
            assert torch.equal(y, b)
    other_epoch = steps(train, 4, 1, start=3)
    assert not torch.equal(other_epoch[0][0], expected[0][0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"images": "cifar11"}, r"data.images must be \"cifar10\" or .*, not \"cifar11\""),
        ({"transforms": {"flip": True}}, "data.transforms needs data.images: set it to one of 'ci"),
        ({"images": "digits", "path": "x"}, "data.path is set, and data.images 'digits' needs no"),
        ({"images": "folder", "path": ["a", "b"]}, "data.path of data.images must be one folder"),
        ({"images": "cifar10", "path": "a", "valid_path": "b"}, "contain the validation images"),
        ({"images": "cifar10", "path": "a", "split": "9,1,0"}, "validation images are those of ci"),
        ({"images": "digits", "format": "text"}, "data.format 'text' is for texts, and data.imag"),
        ({"images": "digits", "mock": True}, "data.mock and data.images are set: keep one"),
        (
            {"images": "digits", "transforms": {"mean": [0]}},
            "mean is set without data.transforms.s",
        ),
        (
            {"images": "digits", "transforms": {"mean": [0], "std": [1, 1]}},
            "data.transforms.mean has 1 number, and data.transforms.std has 2",
        ),
        (
            {"images": "digits", "transforms": {"random_crop": 1, "random_resized_crop": True}},
            "random_crop and data.transforms.random_resized_crop are set: keep one",
        ),
        (
            {"images": "digits", "transforms": {"random_resized_crop": [0.9, 0.1]}},
            r"random_resized_crop is \[0.9, 0.1\]: give the smallest area first",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(keys: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**keys)


def test_the_model_must_fit_the_images() -> None:
    for shape, classes, message in [
        ((2, 8, 8), None, "data.images have 1 or 3 channels, and the model takes 2"),
        ((1, 8, 8), 9, "model.num_classes is 9, and the data, digits that pipemega draws, has 10"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_images(section(images="glyphs"), shape, classes)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"mean has 3 numbers, and the images of the model have 1 channel:"
    ):
        dataset(of_array(1), (1, 4, 4), mean=[0.0] * 3, std=[1.0] * 3)


@pytest.mark.parametrize("keys", [{"auto_augment": "cifar10"}, {"random_resized_crop": True}])
def test_without_torchvision_its_keys_are_refused(
    keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = rf"data.transforms.{next(iter(keys))} needs torchvision.*pip install 'pipemega\[vis"
    with pytest.raises(PipemegaError, match=message):
        dataset(of_array(1), (3, 4, 4), **keys)


def test_torchvision_augments_training_images() -> None:
    imported("torchvision")
    source = built(images="glyphs", shape=(3, 20, 20))["train"].source
    for keys in ({"auto_augment": "cifar10"}, {"random_resized_crop": [0.3, 1.0]}):
        train = dataset(source, (3, 16, 16), **keys)
        images = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            images.append(torch.stack([train[i][0] for i in range(8)]))
        assert images[0].shape == (8, 3, 16, 16)
        assert torch.equal(images[0], images[2])
        assert not torch.equal(images[0], images[1])
