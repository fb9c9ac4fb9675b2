"""The history of the loads of experts, and its picture."""

import numpy as np
import pytest

from pipemega.pipeline.visualize import expert_loads
from pipemega.pipeline.visualize.expert_loads import _MOST_COLUMNS, ExpertLoads

YELLOW = (255, 210, 31)


def test_a_long_history_has_columns_of_equally_many_steps():
    history = ExpertLoads([2, 3], 2)
    for step in range(11, 1011):
        history.add(step, [[step, 0.0], [1.0, 3.0]])
    loads = history.loads()
    assert loads.shape == (2, 2, 1000 // 8)
    assert _MOST_COLUMNS >= 1000 // 8
    assert history.first_step == 11
    assert (loads[0] == [[2.0], [0.0]]).all()
    assert (loads[1] == [[0.5], [1.5]]).all()


def test_every_token_is_counted_in_one_column():
    history, total = ExpertLoads([0], 3), np.zeros(3)
    for step in range(1, 700):
        tokens = [step % 7, step % 5, 1]
        history.add(step, [tokens])
        total += tokens
    assert (sum(history._columns) == total).all()


def test_a_step_without_tokens_has_no_load():
    history = ExpertLoads([0], 2)
    history.add(1, [[0.0, 0.0]])
    assert np.isnan(history.loads()).all()


def colours(file):
    """Return the colours of the pixels, and how many pixels have each."""
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(file)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    found, counts = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(map(int, c)): int(n) for c, n in zip(found, counts, strict=True)}


def test_the_picture_shows_full_and_empty_experts(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "pictures" / "from-step-1.png"
    history = ExpertLoads([2], 4)
    history.add(1, [[6.0, 0.0, 1.0, 1.0]])
    assert history.has_new_steps
    assert history.write(file)
    assert not history.has_new_steps
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    found = colours(file)
    # The row of expert 1; half of the mean is blue, three times the mean is red.
    assert found[YELLOW] > 10_000
    large = [colour for colour, count in found.items() if count > 10_000 and min(colour) < 200]
    assert any(red > 150 > green for red, green, _ in large)
    assert any(blue > 150 > red for red, _, blue in large)


def test_experts_that_share_a_row_show_the_one_farthest_from_the_mean(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(expert_loads, "_MOST_ROWS", 60)
    history, tokens = ExpertLoads(range(4), 64), np.ones((4, 64))
    tokens[2, 7] = 0.0
    history.add(1, tokens.tolist())
    history.write(tmp_path / "many.png")
    assert colours(tmp_path / "many.png")[YELLOW] > 500
