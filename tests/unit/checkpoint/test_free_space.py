"""The free space is compared with the size of the checkpoints, before they are written."""

import re
import shutil
from collections import namedtuple

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.checkpoint import layout
from pipemega.checkpoint.layout import warn_at_start, warn_if_short
from pipemega.storage.filesystem import LocalStorage, storage_at
from tests.ranks.small_models import squared_error

Usage = namedtuple("Usage", "total used free")


def set_free(monkeypatch, free, total=10**15):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, 0, int(free)))


def test_a_checkpoint_that_does_not_fit_is_reported_with_both_numbers(
    tmp_path, monkeypatch, caplog
):
    set_free(monkeypatch, 3.4e9)
    warn_if_short(LocalStorage(tmp_path), int(12.3e9), "checkpoint global_step5")
    assert caplog.messages == [
        f"checkpoint global_step5 will need about 12.3 GB, and {tmp_path} has 3.4 GB free: free "
        "some space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.interval)"
    ]


@pytest.mark.parametrize(
    ("saves", "keep_last", "stored", "needed"),
    [
        (1, None, 0, "about 2.0 MB"),
        (5, None, 0, "5 x about 2.0 MB, in all 10.0 MB"),
        (5, 2, 0, "3 x about 2.0 MB, in all 6.0 MB"),
        (5, 2, 2, "about 2.0 MB"),
        (5, 9, 1, "4 x about 2.0 MB, in all 8.0 MB"),
    ],
)
def test_the_start_considers_the_checkpoints_that_are_kept_and_stored(
    tmp_path, monkeypatch, caplog, saves, keep_last, stored, needed
):
    for step in range(stored):
        (tmp_path / f"global_step{step}").mkdir()
        (tmp_path / f"global_step{step}/state.json").write_text("{}")
    set_free(monkeypatch, 1e6)
    warn_at_start(LocalStorage(tmp_path), 2_000_000, saves, keep_last)
    assert caplog.messages[0].startswith(f"this run will need {needed}, and {tmp_path} has 1.0 MB")


def test_enough_or_unknown_space_is_not_reported(tmp_path, monkeypatch, caplog):
    def fail(_):
        raise OSError(5, "Input/output error")

    set_free(monkeypatch, 2e6)
    warn_if_short(LocalStorage(tmp_path), 2_000_000, "it")
    set_free(monkeypatch, 0, total=0)
    warn_if_short(LocalStorage(tmp_path), 2_000_000, "it")
    monkeypatch.setattr(shutil, "disk_usage", fail)
    warn_if_short(LocalStorage(tmp_path), 2_000_000, "it")
    warn_if_short(storage_at("memory://space"), 2_000_000, "it")
    assert caplog.messages == []


def test_the_space_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path):
    assert LocalStorage(tmp_path / "a/b").free_bytes() == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.1
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    ],
    ids=["fp32", "bf16", "zero", "sgd"],
)
def test_the_start_and_each_save_warn_of_the_size_that_is_then_written(
    tmp_path, monkeypatch, caplog, changes
):
    set_free(monkeypatch, 1000)
    monkeypatch.setattr(layout, "_text", str)
    config = {
        "train_batch_size": 2,
        "mesh": {"device": "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "checkpoint": {"save": str(tmp_path / "run")},
        **changes,
    }
    net = PipelineModule([LayerSpec(nn.Linear, 256, 256)], squared_error)
    engine, *_ = initialize(net, config)
    assert re.search(r"this run will need about \d+, and .*run has 1000 free", caplog.text)
    engine.train_batch(iter([(torch.ones(2, 256), torch.ones(2, 256))]))
    path = engine.save_checkpoint(tmp_path / "run")
    at_start, at_save = map(int, re.findall(r"will need about (\d+),", caplog.text))
    written = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    assert at_save == pytest.approx(written, rel=0.1)
    assert at_start == pytest.approx(at_save, rel=0.01)
