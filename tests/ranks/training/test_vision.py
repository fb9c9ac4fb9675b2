"""Training on images: every mesh sees the same samples; a damaged file; the shipped configs."""

from pathlib import Path

import pytest

from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training import vision_runs
from tests.unit.data.image_files import write_folder

ROOT = Path(__file__).parents[3]


def test_every_mesh_trains_on_the_same_images(pool: RankPool) -> None:
    (alone,) = pool.run(1, vision_runs.train, vision_runs.settings())
    assert "validation loss" in alone["printed"]
    assert "top1 " in alone["printed"]
    assert "top5 " in alone["printed"]
    for size, mesh in [(2, {"pipeline": 2}), (2, {"data": 2}), (4, {"tensor": 2, "pipeline": 2})]:
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


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["vit_digits"])
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"pipeline": 4}, {"data": 2, "pipeline": 2}])
def test_the_shipped_configs_learn_the_digits(
    pool: RankPool, name: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    sizes = tuple(f"mesh.{axis}={size}" for axis, size in {"data": 1, **mesh}.items())
    fixed = ("mesh.device=cpu", "training.progress=false", f'checkpoint.save="{tmp_path}"')
    ranks = mesh.get("data", 1) * mesh["pipeline"]
    found, *_ = pool.run(ranks, vision_runs.train, ROOT / f"configs/{name}.json", sizes + fixed)
    assert found["values"]["top1"] > 0.95
