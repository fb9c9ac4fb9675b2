"""Resumed runs equal uninterrupted ones; failed saves and damaged checkpoints are reported."""

import math
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipemega.checkpoint.layout import complete_tags, delete_leftovers, read_latest
from pipemega.storage.filesystem import LocalStorage
from pipemega.storage.locks import LOCK_FILE
from tests.optional_packages import HAS_MUON
from tests.ranks.checkpoint import checkpoint_runs
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_runs import settings
from tests.sampling import some_cases

FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
# Changes of the config, and the default dtype.
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "fp64": ({}, "float64"),
    "fp32": ({}, "float32"),
    "bf16": ({"bf16": {"enabled": True}}, "float32"),
    "fp16": ({"fp16": FP16}, "float32"),
    "SGD": ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, "float32"),
    "LAMB": ({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, "float32"),
    "ZeRO": ({"zero_optimization": {"stage": 1}}, "float32"),
    "LoRA": ({"lora": {"r": 4, "dropout": 0.1}, "bf16": {"enabled": True}}, "float32"),
    "LoRA, ZeRO": ({"lora": {"r": 4}, "zero_optimization": {"stage": 1}}, "float32"),
    "ZeRO fp16": ({"zero_optimization": {"stage": 1}, "fp16": FP16}, "float32"),
}


# (pipeline, data, tensor) -> the choices to test on it.
MESHES = {
    (2, 1, 1): ("SGD", "LoRA"),
    (1, 2, 1): ("ZeRO fp16", "fp64"),
    (1, 1, 2): ("LAMB",),
    (1, 2, 2): ("LoRA, ZeRO",),
}
SWEPT = {
    (1, 1, 1): ("bf16", "fp64"),
    (2, 1, 1): ("fp32", "bf16"),
    (1, 2, 1): ("fp16", "bf16"),
    (1, 1, 2): ("fp16", "LAMB"),
    (1, 2, 2): ("bf16", "fp64", "ZeRO"),
}


def config_of(mesh: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> dict[str, Any]:
    pipeline, data, tensor = mesh
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    return settings(
        **{
            "train_batch_size": 12,
            "mesh": {"pipeline": pipeline, "data": data, "tensor": tensor},
            "model": {"attention_dropout": 0.1},
            "scheduler": warmup,
            **changes,
        }
    )


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder, without the lock that a rank of the pool still holds."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def size(mesh: tuple[int, int, int]) -> int:
    return mesh[0] * mesh[1] * mesh[2]


@pytest.mark.parametrize(
    ("mesh", "choices"), some_cases([*MESHES.items(), *SWEPT.items()], *range(4)), ids=str
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    pool: RankPool, mesh, choices, tmp_path
):
    """Losses, norms, learning rates, loss scales, parameters, data and RNG states."""
    cases = [(config_of(mesh, **CHOICES[name][0]), CHOICES[name][1]) for name in choices]
    for seen in pool.run(size(mesh), checkpoint_runs.resume_all, cases, str(tmp_path)):
        assert {name: differ for name, (_, differ) in zip(choices, seen, strict=True)} == {
            name: [] for name in choices
        }
        steps = dict(zip(choices, (steps for steps, _ in seen), strict=True))
        rates = [rate for *_, rate in steps[choices[-1]]]
        assert rates[2] < rates[3] < rates[4], "saved while the learning rate was warming up"
        scales = [int(math.log2(scale)) for *_, scale, _ in steps.get("fp16", ())]
        assert scales[:2] in ([], [20, 19]), "saved when the loss scale had fallen"


def test_a_run_saved_in_the_background_is_the_same(pool: RankPool, tmp_path):
    """Although training changes the tensors while they are being written."""
    config = config_of((1, 2, 2), checkpoint={"async": True})
    for run in pool.run(4, checkpoint_runs.resume, config, "float64", str(tmp_path)):
        assert run["resumed"] == run["continued"]


def test_a_run_resumes_from_a_url_that_fsspec_opens(pool: RankPool, tmp_path):
    """Without a rename: the state.json, written last, completes the checkpoint."""
    config = config_of((1, 2, 1), checkpoint={"async": True})
    for run in pool.run(2, checkpoint_runs.resume, config, "float64", f"file://{tmp_path}/deep"):
        assert run["resumed"] == run["continued"]
    assert (tmp_path / "deep" / "latest").read_text() == "global_step3\n"


def test_loading_never_needs_memory_for_the_whole_model(pool: RankPool, tmp_path):
    """On four pipeline ranks, from a checkpoint that one rank has written."""
    pool.run(1, checkpoint_runs.save_wide, {"pipeline": 1}, str(tmp_path))
    whole = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    growth = pool.run(4, checkpoint_runs.growth_of_loading, {"pipeline": 4}, str(tmp_path))
    assert whole > 100e6
    # torch 2.8 copies tensors once more.
    assert max(growth) < (0.6 if HAS_MUON else 0.8) * whole


def test_saving_does_not_change_the_run(pool: RankPool, tmp_path):
    config = config_of((2, 1, 1))
    saved = pool.run(2, checkpoint_runs.resume, config, "float64", str(tmp_path))
    unsaved = pool.run(2, checkpoint_runs.unsaved, config, "float64")
    assert [run["continued"] for run in saved] == unsaved


@pytest.mark.parametrize(
    ("mesh", "bf16"), [((1, 2, 1), False), ((2, 2, 1), False), ((1, 2, 1), True)], ids=str
)
def test_running_statistics_and_frozen_layers_are_restored(pool: RankPool, mesh, bf16, tmp_path):
    """Also on data ranks with other samples; also frozen layers in bf16."""
    pipeline, data, _ = mesh
    config = checkpoint_runs.small_config(
        "AdamW",
        {"lr": 0.01},
        mesh={"pipeline": pipeline, "data": data},
        bf16={"enabled": bf16},
    )
    differ = pool.run(size(mesh), checkpoint_runs.resume_small, config, str(tmp_path))
    assert differ == [[]] * size(mesh)


def test_the_newest_is_loaded_by_default_and_any_other_by_its_tag(pool: RankPool, tmp_path):
    config, folder = config_of((1, 2, 1)), str(tmp_path)
    paths = pool.run(2, checkpoint_runs.save_at, config, folder, [None, "best", None, "best"])
    assert paths[0] == paths[1]
    assert [Path(p).name for p in paths[0]] == ["global_step1", "best", "global_step3", "best"]
    assert pool.run(2, checkpoint_runs.load_step, config, folder) == [4, 4]
    assert pool.run(2, checkpoint_runs.load_step, config, folder, "global_step1") == [1, 1]
    assert names_in(tmp_path) == [
        "best",
        "global_step1",
        "global_step3",
        "latest",
    ]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run on two data ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(2, checkpoint_runs.save_at, config_of((1, 2, 1)), str(folder), [None, None])
    return folder


def load_error(pool: RankPool, world_size: int, *args: Any) -> str:
    """Return the error message, which must be equal on all ranks."""
    errors = pool.run(world_size, checkpoint_runs.load_step, *args)
    assert len(set(errors)) == 1
    assert isinstance(errors[0], str)
    return errors[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"ffn_hidden_size": 32},
            ["is [32, 16] in this run and [24, 16] in the checkpoint", "(and", "more)"],
        ),
        ({"num_layers": 2}, ["is missing in this run and [", "] in the checkpoint"]),
        ({"num_layers": 4}, ["] in this run and missing in the checkpoint"]),
    ],
    ids=["wider", "shorter", "longer"],
)
def test_another_model_is_refused_with_the_first_differences(pool: RankPool, saved, change, parts):
    changed = {"attention_dropout": 0.1, **change}
    (key,) = change
    error = load_error(pool, 2, config_of((1, 2, 1), model=changed), str(saved))
    assert f"would continue with another model: model.{key}: " in error
    allowed = {"allow_changes": ["model"]}
    config = config_of((1, 2, 1), model=changed, checkpoint=allowed)
    error = load_error(pool, 2, config, str(saved))
    assert "global_step2 has another model: parameters/layers." in error
    for part in (*parts, "Build the model as it was when this was saved"):
        assert part in error


def test_the_state_of_another_optimizer_is_refused(pool: RankPool, saved):
    error = load_error(pool, 2, config_of((1, 2, 1), **CHOICES["SGD"][0]), str(saved))
    assert "the state of the optimizer Adam, and this run uses SGD" in error
    assert "restore optimizer.type" in error


@pytest.fixture(scope="module")
def damaged(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per kind of damage; the second of its two checkpoints is damaged."""
    root = tmp_path_factory.mktemp("damaged")

    def of(name: str) -> Path:
        folder = root / name
        subprocess.run(["cp", "-r", saved, folder], check=True)
        return folder / "global_step2"

    def flip(file: Path, at: int = -100) -> None:
        with file.open("r+b") as stream:
            stream.seek(at, os.SEEK_END)
            (byte,) = stream.read(1)
            stream.seek(at, os.SEEK_END)
            stream.write(bytes([byte ^ 1]))

    (of("half") / "state.json").unlink()
    next((of("deleted") / "tensors").glob("__1_*")).unlink()
    shard = next((of("truncated") / "tensors").glob("__0_*"))
    os.truncate(shard, shard.stat().st_size - 1)
    (of("state") / "state.json").write_text("{")
    flip(of("index") / "tensors" / ".metadata")
    own = of("own") / "rank_00001.pt"
    own.write_bytes(bytes(own.stat().st_size))
    flip(next((of("bit") / "tensors").glob("__1_*")), -5000)
    (of("pointer").parent / "latest").write_bytes(b"../\xff\n")
    (of("no pointer").parent / "latest").unlink()
    (of("gone").parent / "latest").write_text("global_step7\n")
    (root / "empty" / ".global_step1.saving").mkdir(parents=True)
    (root / "empty" / ".global_step1.saving" / "rank_00000.pt").write_text("")
    both = of("both").parent
    for step in (1, 2):
        (both / f"global_step{step}" / "client.pt").unlink()
    return root


OTHER_CONTENT = "has the right size but other content: its CRC-32 differs from the"
# The message for each, and the step that is loaded instead if no tag is given.
DAMAGES: dict[str, tuple[str, int | None]] = {
    "half": ("global_step2 is incomplete (no state.json)", 1),
    "deleted": ("global_step2 is damaged: tensors/__1_0.distcp is missing", 1),
    "truncated": ("global_step2 is damaged: tensors/__0_0.distcp has ", 1),
    "state": ("global_step2 is damaged: state.json is damaged: ", 1),
    "index": (f"global_step2 is damaged: tensors/.metadata {OTHER_CONTENT}", 1),
    "own": (f"global_step2 is damaged: rank_00001.pt {OTHER_CONTENT}", 1),
    "bit": (f"global_step2 is damaged: tensors/__1_0.distcp {OTHER_CONTENT}", 1),
    "pointer": ("latest is damaged: ", 2),
    "no pointer": ("has no file 'latest'", 2),
    "gone": ("global_step7 is missing", 2),
    "nowhere": ("no checkpoint folder", None),
    "empty": ("there is no complete checkpoint, only those of interrupted saves: .global", None),
    "both": ("is complete and undamaged: checkpoint", None),
}


def test_if_the_newest_checkpoint_is_damaged_the_previous_one_is_loaded_with_a_warning(
    pool, damaged
):
    paths = [str(damaged / name) for name in DAMAGES]
    results = pool.run(2, checkpoint_runs.load_each, config_of((1, 2, 1)), paths)
    for (name, (text, step)), found, other in zip(DAMAGES.items(), *results, strict=True):
        assert found[0] == other[0]
        if step is None:
            assert text in found[0], name
        else:
            assert found[0] == step, name
            (warning,) = found[1]
            assert text in warning
            assert warning.endswith(f"loading {damaged / name}/global_step{step} instead")
            assert other[1] == []


def test_a_damaged_checkpoint_is_refused_by_its_tag_and_the_others_are_named(pool, damaged):
    names = [name for name, (_, step) in DAMAGES.items() if step == 1]
    paths = [str(damaged / name) for name in names]
    results = pool.run(2, checkpoint_runs.load_each, config_of((1, 2, 1)), paths, "global_step2")
    for name, (text, warnings), (other, _) in zip(names, *results, strict=True):
        assert text == other
        assert DAMAGES[name][0] in text
        assert "complete checkpoints there: global_step1: name one of them as the tag" in text
        assert warnings == []


def test_without_verify_damage_is_reported_when_the_file_is_read(pool, damaged):
    config = config_of((1, 2, 1), checkpoint={"verify": False})
    paths = [str(damaged / name) for name in ("own", "deleted")]
    (own, _), (deleted, _) = pool.run(2, checkpoint_runs.load_each, config, paths)[0]
    assert "rank 1: " in own
    assert "rank_00001.pt is damaged: " in own
    assert deleted == 1, "sizes are always compared"


def test_a_bad_tag_folder_or_client_state_is_refused_on_every_rank(pool: RankPool, tmp_path):
    config = config_of((1, 2, 1))

    def save_error(folder: Path, tag: str = "a", client: Any = None) -> str:
        both = pool.run(2, checkpoint_runs.save_with, config, str(folder), [tag, tag], client)
        assert both[0] == both[1]
        return str(both[0])

    assert "'../a' cannot be the tag, which names a folder" in save_error(tmp_path, "../a")
    (tmp_path / "file").write_text("")
    assert "File exists" in (text := save_error(tmp_path / "file")) or "Not a directory" in text
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    assert "thesis exists and is not a checkpoint" in save_error(tmp_path, "thesis")
    text = save_error(tmp_path, client={"when": Path("x")})
    assert "client_state may contain only tensors, numbers" in text
    assert "pathlib" in text
    each = [str(tmp_path / "0"), str(tmp_path / "1")]
    for text in pool.run(2, checkpoint_runs.save_in_different_folders, config, each):
        assert "rank 1: the folder " in text
        assert "give all ranks the same folder" in text
    assert complete_tags(LocalStorage(tmp_path)) == []


@pytest.mark.parametrize(
    ("validation", "end"),
    [("Fail", "give all ranks the same tag (checkpoint.tag_validation is 'Fail')"), ("Warn", "/a")],
)
def test_different_tags_are_an_error_or_the_tag_of_rank_0_is_used(
    pool: RankPool, validation, end, tmp_path
):
    config = config_of((1, 2, 1), checkpoint={"tag_validation": validation})
    results = pool.run(2, checkpoint_runs.save_with, config, str(tmp_path), ["a", "b"])
    assert results[0] == results[1]
    assert results[0].endswith(end)
    assert complete_tags(LocalStorage(tmp_path)) == ([] if validation == "Fail" else ["a"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs of 4 MB; this needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(
            "mounting a tmpfs is not permitted here; tests with a file size limit cover this"
        )
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_fails_only_the_current_save_and_training_continues(pool: RankPool, small_disk):
    """Whichever file was being written when the disk was full."""
    free_bytes = [0, 8_000, 40_000, 100_000, 200_000]
    results = pool.run(
        2, checkpoint_runs.save_on_full_disk, config_of((1, 2, 1)), str(small_disk), free_bytes
    )
    assert results[0] == results[1]
    for error, loaded in results[0]:
        assert "No space left on device" in error
        assert " MB are free there: free some space, or keep fewer checkpoints" in error
        assert error.endswith("the earlier checkpoints are unchanged")
        assert loaded == 1
    assert complete_tags(LocalStorage(small_disk)) == ["global_step1", "global_step6"]
    assert list(small_disk.glob(".*")) == []


def test_a_rank_that_cannot_write_fails_the_save_of_all(pool: RankPool, tmp_path):
    config = config_of((1, 1, 2))
    for limit in (1_000, 30_000):
        folder = tmp_path / str(limit)
        errors = pool.run(2, checkpoint_runs.save_with_small_files, config, str(folder), limit)
        assert errors[0] == errors[1]
        assert "could not save checkpoint 'global_step2'" in errors[0]
        assert "rank 1: File too large" in errors[0]
        assert names_in(folder) == ["global_step1", "latest"]


def test_a_failed_background_save_is_reported_and_the_next_save_waits(pool: RankPool, tmp_path):
    """The next save fails only if the disk still fails."""
    config = config_of((1, 1, 2), checkpoint={"async": True})
    seen = pool.run(2, checkpoint_runs.fail_in_the_background, config, str(tmp_path))
    for rank, (finish, loaded, warnings, broken) in enumerate(seen):
        for error, step in ((finish, 2), (broken, 5)):
            assert f"could not save checkpoint 'global_step{step}'" in error
            assert "rank 1: File too large" in error
            assert error.endswith("the earlier checkpoints are unchanged")
        assert loaded == 3
        waits = [text for text in warnings if "this time the run waits until the ch" in text]
        assert len(waits) == (1 if rank == 0 else 0)
    assert complete_tags(LocalStorage(tmp_path)) == ["global_step1", "global_step3"]
    assert read_latest(LocalStorage(tmp_path)) == "global_step3"


@pytest.mark.parametrize(
    ("data", "tag", "background", "seed"),
    [
        pytest.param(2, None, False, 0, marks=pytest.mark.sweep),
        (1, "best", False, 1),
        (2, None, True, 2),
        *(
            pytest.param(2, tag, background, s, marks=pytest.mark.sweep)
            for tag in (None, "best")
            for background in (False, True)
            for s in range(10)
        ),
    ],
)
def test_if_a_rank_is_killed_while_saving_the_previous_checkpoint_loads(
    pool: RankPool, data, tag, background, seed, tmp_path
):
    """At random moments; with a new tag for each save, and with one tag for all."""
    config = config_of((1, data, 1), checkpoint={"async": background})
    folder, pids = tmp_path / "saved", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    rng = random.Random(seed)
    victim, delay = rng.randrange(data), rng.random() / 2

    def kill() -> None:
        while read_latest(LocalStorage(folder)) is None:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RanksFailed) as failed:
        pool.run(data, checkpoint_runs.save_forever, config, str(folder), str(pids), tag)
    killer.join()
    errors = {rank: error for rank, (error, _) in failed.value.errors.items()}
    assert errors.pop(victim) == "died"
    assert "hang" not in errors.values()
    latest = read_latest(LocalStorage(folder))
    found = pool.run(data, checkpoint_runs.load_step, config, str(folder))
    assert len(set(found)) == 1
    assert isinstance(found[0], int), found[0]
    if tag is None:
        assert latest == f"global_step{found[0]}"


@pytest.mark.parametrize(
    "calls",
    [(9, 20, 22), pytest.param(tuple(range(1, 40)), marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_checkpoint(
    pool: RankPool, calls, tmp_path
):
    config = config_of((1, 1, 1))
    for call in calls:
        folder = tmp_path / str(call)
        with suppress(RanksFailed):
            # The save needed fewer operations.
            assert pool.run(1, checkpoint_runs.die_at, config, str(folder), call, "best") < [call]
            break
        assert pool.run(1, checkpoint_runs.load_step, config, str(folder)) in ([1], [2])
        delete_leftovers(LocalStorage(folder))
        assert names_in(folder) == ["best", "latest"]
        assert pool.run(1, checkpoint_runs.load_step, config, str(folder)) in ([1], [2])
