"""Training on images: every mesh sees the same samples; a damaged file; the shipped configs."""

import json
from pathlib import Path

import pytest

from pipemega.cli import main
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.trained_models import command
from tests.ranks.training import vision_runs
from tests.unit.data.image_files import write_folder

ROOT = Path(__file__).parents[3]


def test_every_mesh_trains_on_the_same_images(pool: RankPool) -> None:
    (alone,) = pool.run(1, vision_runs.train, vision_runs.settings())
    assert "validation loss" in alone["printed"]
    assert "top1 " in alone["printed"]
    assert "top5 " in alone["printed"]
    for size, mesh in [(2, {"data": 2}), (4, {"tensor": 2, "pipeline": 2})]:
        changed = vision_runs.settings(mesh={"device": "cpu", **mesh})
        for found in pool.run(size, vision_runs.train, changed):
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5), mesh
            assert found["values"] == pytest.approx(alone["values"], rel=1e-5), mesh


def test_a_damaged_image_ends_the_run_of_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_folder(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "b" / "2.png").unlink()
    (tmp_path / "b" / "2.jpg").write_bytes(b"\xff\xd8\xff\xe0 damaged")
    data = {"images": "folder", "path": str(tmp_path), "split": "1,0,0", "transforms": {}}
    model = {"num_channels": 3, "num_classes": 2}
    training = {"eval_interval": 0}
    given = vision_runs.settings(data=data, model=model, training=training)
    given["mesh"] = {"pipeline": 2, "device": "cpu"}
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, vision_runs.train, given)
    assert sorted(failed.value.errors) == [0, 1]
    for text, _ in failed.value.errors.values():
        assert "b/2.jpg cannot be read as an image (" in text
        assert "repair the file, or remove it" in text


def test_a_trained_model_is_evaluated_on_images(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    write_folder(tmp_path / "train", {"a": 6, "b": 6})
    write_folder(tmp_path / "val", {"b": 2, "a": 3})
    data = {"images": "folder", "path": str(tmp_path), "transforms": {}}
    given = vision_runs.settings(
        data=data,
        model={"num_channels": 3, "num_classes": 2, "hidden_dropout": 0.0},
        mesh={"pipeline": 2},
        training={"eval_steps": None},
        checkpoint={"save": str(tmp_path / "run")},
    )
    del given["data"]["split"]
    trained, _ = pool.run(2, vision_runs.train, given)
    for words in ([], ["--data", f"valid={tmp_path / 'val'}"]):
        code, text = command("evaluate", tmp_path / "run", "--json", *words)
        assert code == 0
        found = json.loads(text)["data"]["valid"]
        assert found["samples"] == 5
        assert found["accuracy"] == pytest.approx(trained["values"]["top1"])
        assert found["loss"] == pytest.approx(trained["values"]["loss"], rel=1e-5)
    assert main(["generate", str(tmp_path / "run"), "--prompt", "cat"]) == 2
    expected = "the model was trained on images (data.images 'folder'): it takes no text, and has"
    assert expected in capsys.readouterr().err
    code, text = command("evaluate", tmp_path / "run", "--samples", 2)
    assert (code, text.splitlines()[1].split()) == (
        0, ["data", "loss", "accuracy", "samples", "seconds"],
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["vit_digits", "resnet_digits"])
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"pipeline": 4}, {"data": 2, "pipeline": 2}])
def test_the_shipped_configs_learn_the_digits(
    pool: RankPool, name: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    sizes = tuple(f"mesh.{axis}={size}" for axis, size in {"data": 1, **mesh}.items())
    fixed = ("mesh.device=cpu", "training.progress=false", f'checkpoint.save="{tmp_path}"')
    ranks = mesh.get("data", 1) * mesh["pipeline"]
    found, *_ = pool.run(ranks, vision_runs.train, ROOT / f"configs/{name}.json", sizes + fixed)
    assert found["values"]["top1"] > 0.95
