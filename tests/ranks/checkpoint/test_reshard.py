"""A checkpoint of any mesh resumes on any other mesh.

In fp64 the next step has the loss, the gradients (compared through Adam's averages) and the
parameters of the uninterrupted run in one process, to 1e-10.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.checkpoint import reshard_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some

# (data, tensor, pipeline), and further settings.
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
# With ZeRO: the optimizer state is sharded over the data ranks.
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
            "seq_length": reshard_runs.LENGTH,
            "make_vocab_size_divisible_by": more.get("padding", 8),
        },
    )


def size(name: str) -> int:
    data, tensor, pipeline = MESHES[name][0]
    return data * tensor * pipeline


def by_size(names: list[str]) -> dict[int, list[str]]:
    """Group the meshes by their number of ranks, so that each group needs one pool run."""
    return {
        ranks: list(group) for ranks, group in itertools.groupby(sorted(names, key=size), key=size)
    }


def wrong_after(pool: RankPool, pairs: list[tuple[str, str]], folder: Path) -> list[str]:
    """Save on the first mesh of each pair, resume on the second; return all differences."""
    expected = pool.run(1, reshard_runs.unbroken, config_of("alone"))[0]
    timeout = 120.0 + 5.0 * len(pairs)
    for ranks, names in by_size(sorted({source for source, _ in pairs})).items():
        cases = [(config_of(name), str(folder / name)) for name in names]
        pool.run(ranks, reshard_runs.save_all, cases, timeout=timeout)
    wrong: list[str] = []
    for ranks, names in by_size(sorted({target for _, target in pairs})).items():
        targets = [
            (config_of(name), [str(folder / s) for s, target in pairs if target == name])
            for name in names
        ]
        by_rank = pool.run(
            ranks, reshard_runs.resume_and_compare, targets, expected, timeout=timeout
        )
        for rank, differences in enumerate(by_rank):
            wrong += [f"{names}, rank {rank}: {text}" for text in differences]
    return wrong


def covering_pairs() -> list[tuple[str, str]]:
    """Pairs with each mesh as source or as target, paired with a very different mesh."""
    names = list(MESHES)
    half = len(names) // 2
    pairs = list(zip(names[:half], names[half:], strict=True))
    return [pair[:: -1 if number % 2 else 1] for number, pair in enumerate(pairs)]


@pytest.mark.parametrize("every", some([1, 3], 1))
def test_meshes_work_as_source_or_as_target(pool: RankPool, tmp_path, every):
    assert wrong_after(pool, covering_pairs()[::every], tmp_path) == []


def test_loading_and_saving_on_other_meshes_keeps_every_bit(pool, tmp_path):
    """The fp32 master weights of bf16 and Adam's averages; and all data ranks write a part."""
    route = ["dp2 zero", "tp2 pp2", "dp4 zero", "pp2 chunks 2", "dp2 tp2 zero", "dp3", "alone"]
    configs = [config_of(name) | {"bf16": {"enabled": True}} for name in route]
    folders = [str(tmp_path / name) for name in route]
    pool.run(size(route[0]), reshard_runs.save_all, [(configs[0], folders[0])])
    for name, config, source, target in zip(
        route[1:], configs[1:], folders, folders[1:], strict=False
    ):
        pool.run(size(name), reshard_runs.load_and_save, config, source, target)
    first, *others = [reshard_runs.tensors_in(folder) for folder in folders]
    for name, found in zip(route[1:], others, strict=True):
        assert found.keys() == first.keys()
        assert [key for key in first if not torch.equal(first[key], found[key])] == [], name
    for name in ("dp2 zero", "dp4 zero", "dp3"):
        files = (tmp_path / name).glob("global_step2/tensors/*.distcp")
        sizes = [file.stat().st_size for file in files]
        assert len(sizes) == size(name)
        # Each chunk has about a kilobyte of overhead.
        assert max(sizes) < 2 * min(sizes), name


def test_another_mesh_gets_the_first_data_ranks_statistics_and_new_rng_states(pool, tmp_path):
    saved = pool.run(2, reshard_runs.save_small, {"data": 2}, str(tmp_path))
    assert saved[0] != saved[1], "data ranks see different samples"
    (alone,) = pool.run(1, reshard_runs.load_small, {"data": 1}, str(tmp_path))
    assert alone[0] == saved[0]
    mesh = {"data": 2, "tensor": 2}
    loaded = pool.run(4, reshard_runs.load_small, mesh, str(tmp_path))
    assert [statistics for statistics, _ in loaded] == [saved[0]] * 4
    numbers = [drawn for _, drawn in loaded]
    # Equal on tensor ranks, different on data ranks, and the same in each run.
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    again = pool.run(4, reshard_runs.load_small, mesh, str(tmp_path))
    assert [drawn for _, drawn in again] == numbers
    same = pool.run(2, reshard_runs.load_small, {"data": 2}, str(tmp_path))
    assert [statistics for statistics, _ in same] == saved


@pytest.mark.sweep
def test_from_every_mesh_to_every_other(pool: RankPool, tmp_path):
    """484 pairs: ten minutes on two busy cores."""
    pairs, started = list(itertools.product(MESHES, MESHES)), time.perf_counter()
    assert wrong_after(pool, pairs, tmp_path) == []
    print(f"{len(pairs)} pairs in {time.perf_counter() - started:.0f} s")


def test_a_run_of_the_old_default_cut_resumes_under_the_new_default(
    pool: RankPool, tmp_path: Path
) -> None:
    """Before, stages had even numbers of parameters."""
    run = {"checkpoint": {"save": str(tmp_path)}, "training": {"resume": "auto"}}
    new = {**config_of("pp2"), **run, "pipeline": {}}
    old = {**new, "pipeline": {"partition": "parameters"}}
    expected = pool.run(1, reshard_runs.unbroken, config_of("alone"))[0]
    for bounds, step, found in pool.run(2, reshard_runs.resume_under_another_cut, old, new):
        assert bounds[0] != bounds[1]
        assert step == reshard_runs.BEFORE
        for name in found:
            assert found[name] == pytest.approx(expected[name], rel=1e-10)
