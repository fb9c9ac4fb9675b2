"""A run that was saved goes on as if nothing had happened, or says why it cannot."""

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

from pipemega.checkpoint.disk import LocalDisk
from pipemega.checkpoint.folder import complete, latest, tidy
from tests.ranks import checkpoint_run
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_run import settings

FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
# What is laid over the config, and the default dtype.
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "fp64": ({}, "float64"),
    "fp32": ({}, "float32"),
    "bf16": ({"bf16": {"enabled": True}}, "float32"),
    "fp16": ({"fp16": FP16}, "float32"),
    "SGD": ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, "float32"),
    "LAMB": ({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, "float32"),
    "ZeRO": ({"zero_optimization": {"stage": 1}}, "float32"),
    "ZeRO fp16": ({"zero_optimization": {"stage": 1}, "fp16": FP16}, "float32"),
}


# (pipeline, data, tensor) -> what is tried on it.
MESHES = {
    (1, 1, 1): ("fp64", "fp32", "bf16", "fp16", "SGD", "LAMB"),
    (2, 1, 1): ("fp32", "bf16", "SGD"),
    (1, 2, 1): ("fp16", "ZeRO fp16", "fp64"),
    (1, 1, 2): ("fp16", "LAMB"),
    (1, 2, 2): ("fp64", "bf16", "ZeRO"),
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


def size(mesh: tuple[int, int, int]) -> int:
    return mesh[0] * mesh[1] * mesh[2]


@pytest.mark.parametrize(("mesh", "choices"), MESHES.items(), ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(pool: RankPool, mesh, choices, tmp_path):
    """Losses, norms, rates, loss scales, parameters, data and random streams."""
    cases = [(config_of(mesh, **CHOICES[name][0]), CHOICES[name][1]) for name in choices]
    for seen in pool.run(size(mesh), checkpoint_run.resume_all, cases, str(tmp_path)):
        assert {name: differ for name, (_, differ) in zip(choices, seen, strict=True)} == {
            name: [] for name in choices
        }
        steps = dict(zip(choices, (steps for steps, _ in seen), strict=True))
        rates = [rate for *_, rate in steps[choices[-1]]]
        assert rates[2] < rates[3] < rates[4], "saved while the learning rate was warming up"
        scales = [int(math.log2(scale)) for *_, scale, _ in steps.get("fp16", ())]
        assert scales[:2] in ([], [20, 19]), "saved when the loss scale had fallen"


def test_a_run_saved_in_the_background_is_the_same(pool: RankPool, tmp_path):
    """Though it goes on, and changes its tensors, while they are being written."""
    config = config_of((1, 2, 2), checkpoint={"async": True})
    for run in pool.run(4, checkpoint_run.resume, config, "float64", str(tmp_path)):
        assert run["resumed"] == run["went on"]


def test_a_place_that_fsspec_knows_serves_as_well(pool: RankPool, tmp_path):
    """Without a rename: the last file makes it a checkpoint."""
    config = config_of((1, 2, 1), checkpoint={"async": True})
    for run in pool.run(2, checkpoint_run.resume, config, "float64", f"file://{tmp_path}/deep"):
        assert run["resumed"] == run["went on"]
    assert (tmp_path / "deep" / "latest").read_text() == "global_step3\n"


def test_loading_never_needs_room_for_the_whole_model(pool: RankPool, tmp_path):
    """On four pipeline ranks, from what one rank has written."""
    pool.run(1, checkpoint_run.save_wide, {"pipeline": 1}, str(tmp_path))
    whole = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    grown = pool.run(4, checkpoint_run.growth_of_loading, {"pipeline": 4}, str(tmp_path))
    assert whole > 100e6
    assert max(grown) < 0.6 * whole


def test_saving_changes_nothing(pool: RankPool, tmp_path):
    config = config_of((2, 1, 1))
    saved = pool.run(2, checkpoint_run.resume, config, "float64", str(tmp_path))
    unsaved = pool.run(2, checkpoint_run.unsaved, config, "float64")
    assert [run["went on"] for run in saved] == unsaved


@pytest.mark.parametrize(
    ("mesh", "bf16"), [((1, 2, 1), False), ((2, 2, 1), False), ((1, 2, 1), True)], ids=str
)
def test_running_statistics_and_frozen_layers_come_back(pool: RankPool, mesh, bf16, tmp_path):
    """Also on data ranks, which have seen other samples; also what is frozen in bf16."""
    pipeline, data, _ = mesh
    config = checkpoint_run.small_config(
        "AdamW",
        {"lr": 0.01},
        mesh={"pipeline": pipeline, "data": data},
        bf16={"enabled": bf16},
    )
    differ = pool.run(size(mesh), checkpoint_run.resume_small, config, str(tmp_path))
    assert differ == [[]] * size(mesh)


def test_the_newest_is_loaded_and_any_other_by_its_tag(pool: RankPool, tmp_path):
    config, folder = config_of((1, 2, 1)), str(tmp_path)
    paths = pool.run(2, checkpoint_run.save_at, config, folder, [None, "best", None, "best"])
    assert paths[0] == paths[1]
    assert [Path(p).name for p in paths[0]] == ["global_step1", "best", "global_step3", "best"]
    assert pool.run(2, checkpoint_run.load_step, config, folder) == [4, 4]
    assert pool.run(2, checkpoint_run.load_step, config, folder, "global_step1") == [1, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best",
        "global_step1",
        "global_step3",
        "latest",
    ]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the plain run on two data ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(2, checkpoint_run.save_at, config_of((1, 2, 1)), str(folder), [None, None])
    return folder


def refusal(pool: RankPool, world_size: int, *args: Any) -> str:
    """What every rank says alike."""
    said = pool.run(world_size, checkpoint_run.load_step, *args)
    assert len(set(said)) == 1
    assert isinstance(said[0], str)
    return said[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"ffn_hidden_size": 32}, ["is [32, 16] here and [24, 16] there", "(and", "more)"]),
        ({"num_layers": 2}, ["is missing here and [", "] there"]),
        ({"num_layers": 4}, ["] here and missing there"]),
    ],
    ids=["wider", "shorter", "longer"],
)
def test_another_model_is_refused_with_the_first_differences(pool: RankPool, saved, change, parts):
    changed = {"attention_dropout": 0.1, **change}
    (key,) = change
    said = refusal(pool, 2, config_of((1, 2, 1), model=changed), str(saved))
    assert f"would go on with another model: model.{key}: " in said
    meant = {"allow_changes": ["model"]}
    said = refusal(pool, 2, config_of((1, 2, 1), model=changed, checkpoint=meant), str(saved))
    assert "global_step2 is of another model: parameters/layers." in said
    for part in (*parts, "Build the model as it was when this was saved"):
        assert part in said


def test_the_state_of_another_optimizer_is_refused(pool: RankPool, saved):
    said = refusal(pool, 2, config_of((1, 2, 1), **CHOICES["SGD"][0]), str(saved))
    assert "the state of the optimizer Adam, and this run has SGD" in said
    assert "set optimizer.type as it was" in said


@pytest.fixture(scope="module")
def damaged(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each way in which the second of two checkpoints can be damaged."""
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


OTHER_CONTENTS = "has the right size and other contents: its SHA-256 is not the one that was"
# What is said of each, and which step is loaded all the same when no tag is given.
DAMAGES: dict[str, tuple[str, int | None]] = {
    "half": ("global_step2 is half-written (no state.json)", 1),
    "deleted": ("global_step2 is damaged: tensors/__1_0.distcp is missing", 1),
    "truncated": ("global_step2 is damaged: tensors/__0_0.distcp has ", 1),
    "state": ("global_step2 is damaged: state.json is damaged: ", 1),
    "index": (f"global_step2 is damaged: tensors/.metadata {OTHER_CONTENTS}", 1),
    "own": (f"global_step2 is damaged: rank_00001.pt {OTHER_CONTENTS}", 1),
    "bit": (f"global_step2 is damaged: tensors/__1_0.distcp {OTHER_CONTENTS}", 1),
    "pointer": ("latest is damaged: ", 2),
    "no pointer": ("has no file 'latest'", 2),
    "gone": ("global_step7 is missing", 2),
    "nowhere": ("no checkpoint folder", None),
    "empty": ("there is no complete one, only what an interrupted save left: .global_step1", None),
    "both": ("is whole: checkpoint", None),
}


def test_a_damaged_newest_one_is_skipped_with_a_warning_for_the_one_before(pool, damaged):
    paths = [str(damaged / name) for name in DAMAGES]
    said = pool.run(2, checkpoint_run.load_each, config_of((1, 2, 1)), paths)
    for (name, (text, step)), found, other in zip(DAMAGES.items(), *said, strict=True):
        assert found[0] == other[0]
        if step is None:
            assert text in found[0], name
        else:
            assert found[0] == step, name
            (warning,) = found[1]
            assert text in warning
            assert warning.endswith(f"loading {damaged / name}/global_step{step} instead")
            assert other[1] == []


def test_by_its_tag_a_damaged_one_is_refused_and_the_others_named(pool, damaged):
    names = [name for name, (_, step) in DAMAGES.items() if step == 1]
    paths = [str(damaged / name) for name in names]
    said = pool.run(2, checkpoint_run.load_each, config_of((1, 2, 1)), paths, "global_step2")
    for name, (text, warnings), (other, _) in zip(names, *said, strict=True):
        assert text == other
        assert DAMAGES[name][0] in text
        assert "complete ones there: global_step1: name one of them as the tag" in text
        assert warnings == []


def test_without_comparing_sums_damage_is_met_when_it_is_read(pool, damaged):
    config = config_of((1, 2, 1), checkpoint={"verify": False})
    paths = [str(damaged / name) for name in ("own", "deleted")]
    (own, _), (deleted, _) = pool.run(2, checkpoint_run.load_each, config, paths)[0]
    assert "rank 1: " in own
    assert "rank_00001.pt is damaged: " in own
    assert deleted == 1, "sizes are always compared"


def test_a_bad_tag_folder_or_client_state_is_refused_on_every_rank(pool: RankPool, tmp_path):
    config = config_of((1, 2, 1))

    def said(folder: Path, tag: str = "a", client: Any = None) -> str:
        both = pool.run(2, checkpoint_run.save_with, config, str(folder), [tag, tag], client)
        assert both[0] == both[1]
        return str(both[0])

    assert "'../a' cannot be the tag, which names a folder" in said(tmp_path, "../a")
    (tmp_path / "file").write_text("")
    assert "File exists" in said(tmp_path / "file") or "Not a directory" in said(tmp_path / "file")
    (tmp_path / "thesis").mkdir()
    assert "thesis is there already and is no checkpoint" in said(tmp_path, "thesis")
    text = said(tmp_path, client={"when": Path("x")})
    assert "client_state may hold tensors, numbers, strings" in text
    assert "pathlib" in text
    each = [str(tmp_path / "0"), str(tmp_path / "1")]
    for text in pool.run(2, checkpoint_run.save_in_a_folder_each, config, each):
        assert "rank 1: there is no folder" in text
        assert "give all ranks the same folder" in text
    assert complete(LocalDisk(tmp_path)) == []


@pytest.mark.parametrize(
    ("validation", "end"),
    [("Fail", "give all ranks the same tag (checkpoint.tag_validation is 'Fail')"), ("Warn", "/a")],
)
def test_different_tags_are_an_error_or_that_of_rank_0(pool: RankPool, validation, end, tmp_path):
    config = config_of((1, 2, 1), checkpoint={"tag_validation": validation})
    said = pool.run(2, checkpoint_run.save_with, config, str(tmp_path), ["a", "b"])
    assert said[0] == said[1]
    assert said[0].endswith(end)
    assert complete(LocalDisk(tmp_path)) == ([] if validation == "Fail" else ["a"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB, as root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here; a limit on file sizes stands in")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_costs_the_checkpoint_that_did_not_fit_and_no_other(pool: RankPool, small_disk):
    """Whatever was being written when it was full; and the run goes on."""
    leave = [0, 8_000, 40_000, 100_000, 200_000]
    results = pool.run(
        2, checkpoint_run.fill_the_disk, config_of((1, 2, 1)), str(small_disk), leave
    )
    assert results[0] == results[1]
    for said, loaded in results[0]:
        assert "No space left on device" in said
        assert " MB are left there: make room, or keep fewer checkpoints" in said
        assert said.endswith("the checkpoints before it are whole")
        assert loaded == 1
    assert complete(LocalDisk(small_disk)) == ["global_step1", "global_step6"]
    assert list(small_disk.glob(".*")) == []


def test_a_rank_that_cannot_write_fails_the_save_of_all(pool: RankPool, tmp_path):
    config = config_of((1, 1, 2))
    for limit in (1_000, 30_000):
        folder = tmp_path / str(limit)
        said = pool.run(2, checkpoint_run.save_with_small_files, config, str(folder), limit)
        assert said[0] == said[1]
        assert "could not save checkpoint 'global_step2'" in said[0]
        assert "rank 1: File too large" in said[0]
        assert sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]


def test_what_fails_in_the_background_is_said_and_costs_one_checkpoint(pool: RankPool, tmp_path):
    """At the next save, which then waits; that save fails only if the disk is still broken."""
    config = config_of((1, 1, 2), checkpoint={"async": True})
    seen = pool.run(2, checkpoint_run.fail_in_the_background, config, str(tmp_path))
    for rank, (finish, mended, said, broken) in enumerate(seen):
        for error, step in ((finish, 2), (broken, 5)):
            assert f"could not save checkpoint 'global_step{step}'" in error
            assert "rank 1: File too large" in error
            assert error.endswith("the checkpoints before it are whole")
        assert mended == 3
        waits = [text for text in said if "this time the run waits until it is saved" in text]
        assert len(waits) == (1 if rank == 0 else 0)
    assert complete(LocalDisk(tmp_path)) == ["global_step1", "global_step3"]
    assert latest(LocalDisk(tmp_path)) == "global_step3"


@pytest.mark.parametrize(
    ("data", "tag", "background", "seed"),
    [
        (2, None, False, 0),
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
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    pool: RankPool, data, tag, background, seed, tmp_path
):
    """At any moment; under names of their own, and over and over under one."""
    config = config_of((1, data, 1), checkpoint={"async": background})
    folder, pids = tmp_path / "saved", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    chance = random.Random(seed)
    victim, delay = chance.randrange(data), chance.random() / 2

    def kill() -> None:
        while latest(LocalDisk(folder)) is None:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RanksFailed) as failed:
        pool.run(data, checkpoint_run.save_forever, config, str(folder), str(pids), tag)
    killer.join()
    said = {rank: error for rank, (error, _) in failed.value.errors.items()}
    assert said.pop(victim) == "died"
    assert "hang" not in said.values()
    pointed = latest(LocalDisk(folder))
    found = pool.run(data, checkpoint_run.load_step, config, str(folder))
    assert len(set(found)) == 1
    assert isinstance(found[0], int), found[0]
    if tag is None:
        assert pointed == f"global_step{found[0]}"


@pytest.mark.parametrize(
    "calls",
    [(9, 20, 22), pytest.param(tuple(range(1, 40)), marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_a_kill_between_any_two_calls_to_the_disk_leaves_one_or_the_other(
    pool: RankPool, calls, tmp_path
):
    config = config_of((1, 1, 1))
    for call in calls:
        folder = tmp_path / str(call)
        with suppress(RanksFailed):
            # All done with fewer calls.
            assert pool.run(1, checkpoint_run.die_at, config, str(folder), call, "best") < [call]
            break
        assert pool.run(1, checkpoint_run.load_step, config, str(folder)) in ([1], [2])
        tidy(LocalDisk(folder))
        assert sorted(path.name for path in folder.iterdir()) == ["best", "latest"]
        assert pool.run(1, checkpoint_run.load_step, config, str(folder)) in ([1], [2])
