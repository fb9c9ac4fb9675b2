"""A checkpoint of any mesh goes on on any other, as if nothing had happened.

In fp64 the step that comes next has the loss, the gradients (by Adam's averages of them) and the
parameters of the run in one process that was never interrupted, to 1e-10.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import reshard_run
from tests.ranks.pool import RankPool
from tests.ranks.training_run import settings

# data, tensor, pipeline, and what else belongs to it.
MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "alone": ((1, 1, 1), {}),
    "dp2": ((2, 1, 1), {}),
    "tp2": ((1, 2, 1), {}),
    "pp2": ((1, 1, 2), {"schedule": "zb-h1"}),
    "dp3": ((3, 1, 1), {}),
    "tp3": ((1, 3, 1), {"sequence_parallel": True, "padding": 4}),
    "pp3": ((1, 1, 3), {"schedule": "gpipe"}),
    "dp4": ((4, 1, 1), {}),
    "tp4": ((1, 4, 1), {"padding": 16}),
    "pp4": ((1, 1, 4), {}),
    "dp2 tp2": ((2, 2, 1), {"sequence_parallel": True}),
    "dp2 pp2": ((2, 1, 2), {"schedule": "zb-v"}),
    "tp2 pp2": ((1, 2, 2), {"schedule": "gpipe"}),
    "pp2 chunks 2": ((1, 1, 2), {"schedule": "interleaved", "chunks": 2}),
    "pp2 v": ((1, 1, 2), {"schedule": "zb-v"}),
    "dp2 pp2 chunks 2": ((2, 1, 2), {"schedule": "interleaved", "chunks": 2}),
}
# With the optimizer's state cut over the data ranks.
MESHES |= {
    f"{name} zero": (mesh, {**more, "zero": 1})
    for name, (mesh, more) in MESHES.items()
    if mesh[0] > 1
}


def config_of(name: str) -> dict[str, Any]:
    (data, tensor, pipeline), more = MESHES[name]
    stages = {key: more[key] for key in ("schedule", "chunks") if key in more}
    return settings(
        train_batch_size=24,
        mesh={
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "sequence_parallel": more.get("sequence_parallel", False),
        },
        pipeline=stages,
        zero_optimization={"stage": more.get("zero", 0)},
        model={
            "hidden_size": 24,
            "num_attention_heads": 12,
            "num_query_groups": 12,
            "num_layers": 3,
            "seq_length": reshard_run.LENGTH,
            "make_vocab_size_divisible_by": more.get("padding", 8),
        },
    )


def size(name: str) -> int:
    data, tensor, pipeline = MESHES[name][0]
    return data * tensor * pipeline


def by_size(names: list[str]) -> dict[int, list[str]]:
    """The meshes that as many ranks make up, so that these are started once."""
    return {
        ranks: list(group) for ranks, group in itertools.groupby(sorted(names, key=size), key=size)
    }


def wrong_after(pool: RankPool, pairs: list[tuple[str, str]], folder: Path) -> list[str]:
    """What differs after a change from one mesh to another, of each pair."""
    expected = pool.run(1, reshard_run.unbroken, config_of("alone"))[0]
    patience = 120.0 + 5.0 * len(pairs)
    for ranks, names in by_size(sorted({source for source, _ in pairs})).items():
        cases = [(config_of(name), str(folder / name)) for name in names]
        pool.run(ranks, reshard_run.save_all, cases, timeout=patience)
    wrong: list[str] = []
    for ranks, names in by_size(sorted({target for _, target in pairs})).items():
        going = [
            (config_of(name), [str(folder / s) for s, target in pairs if target == name])
            for name in names
        ]
        said_by = pool.run(ranks, reshard_run.go_on, going, expected, timeout=patience)
        for rank, said in enumerate(said_by):
            wrong += [f"{names}, rank {rank}: {text}" for text in said]
    return wrong


def spanning() -> list[tuple[str, str]]:
    """Each mesh as a source and as a target, to and from one that has little in common with it."""
    names = list(MESHES)
    half = len(names) // 2
    pairs = [(a, b) for a, b in zip(names, names[half:] + names[:half], strict=True)]
    return [*pairs, ("tp4", "dp4"), ("pp4", "tp4"), ("dp4", "pp4"), ("dp2 tp2", "tp2 pp2")]


def test_every_mesh_is_left_and_entered(pool: RankPool, tmp_path):
    assert wrong_after(pool, spanning(), tmp_path) == []


def test_what_is_loaded_and_saved_again_has_every_bit_whatever_the_meshes(pool, tmp_path):
    """The fp32 masters of bf16, and Adam's averages of them; and nobody has written it all."""
    way = ["dp2 zero", "tp2 pp2", "dp4 zero", "pp2 chunks 2", "dp2 tp2 zero", "dp3", "alone"]
    configs = [config_of(name) | {"bf16": {"enabled": True}} for name in way]
    folders = [str(tmp_path / name) for name in way]
    pool.run(size(way[0]), reshard_run.save_all, [(configs[0], folders[0])])
    for name, config, source, target in zip(
        way[1:], configs[1:], folders, folders[1:], strict=False
    ):
        pool.run(size(name), reshard_run.pass_on, config, source, target)
    first, *others = [reshard_run.tensors_in(folder) for folder in folders]
    for name, found in zip(way[1:], others, strict=True):
        assert found.keys() == first.keys()
        assert [key for key in first if not torch.equal(first[key], found[key])] == [], name
    for name in ("dp2 zero", "dp4 zero", "dp3"):
        files = (tmp_path / name).glob("global_step2/tensors/*.distcp")
        sizes = [file.stat().st_size for file in files]
        assert len(sizes) == size(name)
        # Beside its numbers each chunk has a kilobyte of its own.
        assert max(sizes) < 2 * min(sizes), name


def test_on_another_mesh_statistics_are_the_first_data_ranks_and_streams_are_new(pool, tmp_path):
    saved = pool.run(2, reshard_run.save_small, {"data": 2}, str(tmp_path))
    assert saved[0] != saved[1], "data ranks have seen other samples"
    (alone,) = pool.run(1, reshard_run.load_small, {"data": 1}, str(tmp_path))
    assert alone[0] == saved[0]
    mesh = {"data": 2, "tensor": 2}
    loaded = pool.run(4, reshard_run.load_small, mesh, str(tmp_path))
    assert [statistics for statistics, _ in loaded] == [saved[0]] * 4
    streams = [drawn for _, drawn in loaded]
    # Tensor ranks draw alike, data ranks do not; and they do so each time.
    assert streams[0] == streams[1] != streams[2] == streams[3]
    again = pool.run(4, reshard_run.load_small, mesh, str(tmp_path))
    assert [drawn for _, drawn in again] == streams
    same = pool.run(2, reshard_run.load_small, {"data": 2}, str(tmp_path))
    assert [statistics for statistics, _ in same] == saved


@pytest.mark.sweep
def test_from_every_mesh_to_every_other(pool: RankPool, tmp_path):
    """484 pairs: ten minutes on two busy cores."""
    pairs, started = list(itertools.product(MESHES, MESHES)), time.perf_counter()
    assert wrong_after(pool, pairs, tmp_path) == []
    print(f"{len(pairs)} pairs in {time.perf_counter() - started:.0f} s")
