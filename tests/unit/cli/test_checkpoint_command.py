"""`python -m pipemega checkpoint ls|verify|show`."""

from pathlib import Path

import pytest

from pipemega import initialize
from pipemega.cli import main
from tests.ranks.checkpoint.checkpoint_runs import small_config, small_data, small_net

CONFIG = small_config("AdamW", {"lr": 0.01})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = initialize(small_net(statistics=True), CONFIG)[0]
    for step in range(2):
        engine.train_batch(small_data(engine, step))
        engine.save_checkpoint(tmp_path)
    return tmp_path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_ls_lists_tag_step_size_age_mesh_and_state(saved, capsys):
    (saved / "global_step1" / "client.pt").unlink()
    code, text = run_cli(capsys, "ls", saved)
    assert code == 0
    head, first, second = text.splitlines()
    assert head.split() == ["tag", "step", "size", "age", "mesh", "state"]
    assert first.split()[0] == "global_step1"
    assert "is damaged: client.pt is missing" in first
    assert second.split()[:5] == ["global_step2", "*", "2", "0.1", "MB"]
    assert second.endswith("pipeline 1 x data 1 x tensor 1  complete (sizes checked)")


def test_verify_compares_every_checksum_and_names_the_damaged_file(saved, capsys):
    code, text = run_cli(capsys, "verify", saved)
    assert code == 0
    assert text.count(": undamaged, ") == 2
    flip(saved / "global_step1" / "tensors" / "__0_0.distcp")
    code, text = run_cli(capsys, "verify", saved)
    assert code == 1
    assert f"{saved}/global_step1: DAMAGED: tensors/__0_0.distcp has the right size but" in text
    assert f"{saved}/global_step2: undamaged, 4 files, 0.1 MB" in text
    assert run_cli(capsys, "verify", saved / "global_step1")[0] == 1
    assert run_cli(capsys, "verify", saved / "global_step2")[0] == 0
    assert run_cli(capsys, "verify", saved, "--tag", "global_step2")[0] == 0
    (saved / "global_step2" / "state.json").unlink()
    code, text = run_cli(capsys, "verify", saved, "--tag", "global_step2")
    assert code == 1
    assert "global_step2: DAMAGED: is incomplete (no state.json)" in text


@pytest.mark.parametrize("path", ["", "/global_step2", "url"])
def test_show_prints_mesh_step_tensors_and_config(saved, capsys, path):
    full = f"file://{saved}" if path == "url" else f"{saved}{path}"
    code, text = run_cli(capsys, "show", full, "--tensors", "--config")
    assert code == 0
    for part in (
        "mesh      pipeline 1 x data 1 x tensor 1",
        "step      2",
        "samples   32",
        "parameters/layers.0.weight  [8, 6]  float32",
        "buffers/layers.1.num_batches_tracked  []  int64",
        "optimizer/exp_avg/layers.4.bias  [4]  float32",
        '"train_batch_size": 16',
    ):
        assert part in text


def test_show_fits_on_a_screen_and_names_the_options_that_print_more(saved, capsys):
    """It printed every tensor and every key of the config: 378 lines for 19,364 parameters."""
    code, text = run_cli(capsys, "show", saved)
    assert code == 0
    assert len(text.splitlines()) < 12
    assert "  parameters 9 tensors, 181 values" in text
    assert "  optimizer 21 tensors, 225 values" in text
    assert "  --tensors lists the tensors, --config prints the config" in text


def test_a_missing_folder_or_checkpoint_is_an_error_in_one_line(tmp_path, capsys):
    code, text = run_cli(capsys, "ls", tmp_path / "no")
    assert (code, text.count("\n")) == (2, 1)
    assert "no checkpoint folder" in text
    code, text = run_cli(capsys, "show", tmp_path)
    assert code == 2
    assert "no checkpoint was saved here" in text
