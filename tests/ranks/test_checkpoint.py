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
}


# (pipeline, data, tensor) -> what is tried on it.
MESHES = {
    (1, 1, 1): tuple(CHOICES),
    (2, 1, 1): ("fp32", "bf16", "SGD"),
    (1, 2, 1): ("fp16", "fp64"),
    (1, 1, 2): ("fp16", "LAMB"),
    (1, 2, 2): ("fp64", "bf16"),
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


def test_another_mesh_is_named_beside_that_of_the_checkpoint(pool: RankPool, saved):
    said = refusal(pool, 2, config_of((1, 1, 2)), str(saved))
    assert "saved on the mesh pipeline 1 x data 2 x tensor 1" in said
    assert "this run has pipeline 1 x data 1 x tensor 2" in said
    assert "not here yet: start as many ranks" in said
    said = refusal(pool, 1, config_of((1, 1, 1)), str(saved))
    assert "this run has pipeline 1 x data 1 x tensor 1" in said


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
    said = refusal(
        pool, 2, config_of((1, 2, 1), model={"attention_dropout": 0.1, **change}), str(saved)
    )
    assert "global_step2 is of another model: parameters/layers." in said
    for part in (*parts, "Build the model as it was when this was saved"):
        assert part in said


def test_the_state_of_another_optimizer_is_refused(pool: RankPool, saved):
    said = refusal(pool, 2, config_of((1, 2, 1), **CHOICES["SGD"][0]), str(saved))
    assert "the state of the optimizer Adam, and this run has SGD" in said
    assert "set optimizer.type as it was" in said


def test_what_is_missing_half_written_or_damaged_is_refused_by_name(
    pool: RankPool, saved, tmp_path
):
    def damaged(name: str) -> Path:
        folder = tmp_path / name
        subprocess.run(["cp", "-r", saved, folder], check=True)
        return folder / "global_step2"

    (damaged("half") / "state.json").unlink()
    next((damaged("deleted") / "tensors").glob("__1_*")).unlink()
    shard = next((damaged("truncated") / "tensors").glob("__0_*"))
    os.truncate(shard, shard.stat().st_size - 1)
    (damaged("state") / "state.json").write_text("{")
    with (damaged("index") / "tensors" / ".metadata").open("r+b") as file:
        file.write(b"\0" * 100)
    with (damaged("zip") / "rank_00001.pt").open("r+b") as file:
        file.write(b"\0" * 100)
        file.seek(-100, os.SEEK_END)
        file.write(b"\0" * 100)
    shard = next((damaged("shard") / "tensors").glob("__0_*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    (damaged("pointer").parent / "latest").write_bytes(b"../\xff\n")
    (damaged("no pointer").parent / "latest").unlink()
    (damaged("gone").parent / "latest").write_text("global_step7\n")
    (tmp_path / "empty" / ".global_step1.saving").mkdir(parents=True)
    wanted = {
        "nowhere": ["no checkpoint folder", "is the path right?"],
        "half": [
            "global_step2 is half-written (no state.json)",
            "complete ones there: global_step1: name one of them as the tag",
        ],
        "deleted": ["global_step2 is damaged: tensors/__1_0.distcp is missing", "were written"],
        "truncated": ["is damaged: tensors/__0_0.distcp has ", " bytes were written"],
        "state": ["state.json is damaged: "],
        "index": ["tensors/.metadata is damaged: "],
        "zip": ["rank 1: ", "rank_00001.pt is damaged: "],
        "shard": ["rank 0: ", "failed"],
        "pointer": ["latest is damaged", "is no tag", "complete ones there: global_step1, global"],
        "no pointer": ["has no file 'latest'", "complete ones there: global_step1, global_step2"],
        "gone": ["global_step7 is missing", "complete ones there: global_step1, global_step2"],
        "empty": ["there is no complete one, only what an interrupted save left: .global_step1"],
    }
    paths = [str(tmp_path / name) for name in wanted]
    said = pool.run(2, checkpoint_run.load_each, config_of((1, 2, 1)), paths)
    assert said[0] == said[1]
    for name, text in zip(wanted, said[0], strict=True):
        assert [part for part in wanted[name] if part not in str(text)] == [], (name, text)


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
    assert "the checkpoints before it are whole" in text
    each = [str(tmp_path / "0"), str(tmp_path / "1")]
    for text in pool.run(2, checkpoint_run.save_in_a_folder_each, config, each):
        assert "rank 1: there is no folder" in text
        assert "give all ranks the same folder" in text
    assert complete(tmp_path) == []


@pytest.mark.parametrize(
    ("validation", "end"),
    [("Fail", "give all ranks the same tag (checkpoint.tag_validation is 'Fail')"), ("Warn", "/a")],
)
def test_different_tags_are_an_error_or_that_of_rank_0(pool: RankPool, validation, end, tmp_path):
    config = config_of((1, 2, 1), checkpoint={"tag_validation": validation})
    said = pool.run(2, checkpoint_run.save_with, config, str(tmp_path), ["a", "b"])
    assert said[0] == said[1]
    assert said[0].endswith(end)
    assert [path.name for path in complete(tmp_path)] == ([] if validation == "Fail" else ["a"])


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
    assert [path.name for path in complete(small_disk)] == ["global_step1", "global_step6"]
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


@pytest.mark.parametrize(
    ("data", "tag", "seed"),
    [
        (2, None, 0),
        (1, "best", 1),
        (1, None, 2),
        *(
            pytest.param(2, tag, s, marks=pytest.mark.sweep)
            for tag in (None, "best")
            for s in range(20)
        ),
    ],
)
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    pool: RankPool, data, tag, seed, tmp_path
):
    """At any moment; under names of their own, and over and over under one."""
    config = config_of((1, data, 1))
    folder, pids = tmp_path / "saved", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    chance = random.Random(seed)
    victim, delay = chance.randrange(data), chance.random() / 2

    def kill() -> None:
        while latest(folder) is None:
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
    pointed = latest(folder)
    found = pool.run(data, checkpoint_run.load_step, config, str(folder))
    assert len(set(found)) == 1
    assert isinstance(found[0], int), found[0]
    if tag is None:
        assert pointed == f"global_step{found[0]}"


@pytest.mark.parametrize(
    "calls",
    [(9, 19, 24), pytest.param(tuple(range(1, 40)), marks=pytest.mark.sweep)],
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
        tidy(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["best", "latest"]
        assert pool.run(1, checkpoint_run.load_step, config, str(folder)) in ([1], [2])
