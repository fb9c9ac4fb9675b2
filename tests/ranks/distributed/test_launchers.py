"""Ranks that start without torchrun, and the logs of the ranks."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pipemega
from pipemega.errors import ConfigError
from tests.ranks.pool import RankPool

ROOT = Path(__file__).parents[3]

SCRIPT = """
import pipemega
with pipemega.run():
    mesh = pipemega.build_mesh(pipemega.load_config({"train_batch_size": 2, "mesh": MESH}))
    log = pipemega.rank_logger()
    log.info("of each rank")
    log.info("of rank 1", ranks=[1])
    print(mesh.rank, mesh.world.size, mesh.topology.data)
"""

SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NODELIST": "localhost",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")


def start(script: str, variables: dict[str, str]) -> list[tuple[int, str, str]]:
    """Run a script on two ranks; return (exit code, output, errors) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    base |= {"PYTHONPATH": str(ROOT), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=base | {name: text.format(rank=rank) for name, text in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=120) for rank in ranks]
    # torch 2.8 writes lines of gloo to stdout.
    outputs = [re.sub(r"^\[Gloo\].*\n", "", out, flags=re.MULTILINE) for out, _ in ended]
    return [
        (p.returncode, out, err) for p, out, (_, err) in zip(ranks, outputs, ended, strict=True)
    ]


@pytest.mark.parametrize(
    "variables", [SLURM, pytest.param(OPEN_MPI, marks=pytest.mark.sweep)], ids=["srun", "mpirun"]
)
def test_ranks_that_srun_or_mpirun_has_started_need_no_torchrun(
    variables: dict[str, str], tmp_path: Path
) -> None:
    mesh = {"backend": "gloo"}
    first, second = start(SCRIPT.replace("MESH", repr(mesh)), variables)
    assert first[:2] == (0, "0 2 2\n"), first
    assert second[:2] == (0, "1 2 2\n"), second
    assert "INFO: of each rank" in first[2]
    assert "of rank 1" not in first[2]
    assert "rank 1 INFO: of rank 1" in second[2]
    assert "of each rank" not in second[2]


@pytest.mark.sweep
@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI], ids=["srun", "mpirun"])
def test_deepspeed_s_call_sets_the_variables_that_its_scripts_read(
    variables: dict[str, str],
) -> None:
    script = """
import os
import pipemega.compat.deepspeed as deepspeed
deepspeed.init_distributed()
print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
"""
    assert [rank[:2] for rank in start(script, variables)] == [(0, "0 0 2\n"), (0, "1 1 2\n")]


def spawned(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = pipemega.build_mesh(
        pipemega.load_config({"train_batch_size": 2, "mesh": {"pipeline": 2, "device": "cpu"}})
    )
    assert (mesh.rank, mesh.pipeline.size) == (rank, 2)
    dist.destroy_process_group()


@pytest.mark.sweep
def test_a_function_of_mp_spawn_joins_the_ranks_itself() -> None:
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(spawned, (port,), nprocs=2)


@pytest.mark.sweep
def test_torch_distributed_launch_starts_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    parse = "import argparse\nargs = pipemega.add_arguments(argparse.ArgumentParser()).parse_args()"
    body = SCRIPT.replace("import pipemega\n", f"import pipemega\n{parse}\n", 1)
    script.write_text(body.replace("MESH", repr({"device": "cpu"})))
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    command += [str(script), "--config", "unused.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["0 2 2", "1 2 2"]


def logged(section: dict[str, Any], folder: str) -> tuple[str, str]:
    """Log on this rank; return the content of its file, and the error of the section, if any."""
    config = pipemega.load_config(
        {"train_batch_size": 2, "mesh": {"device": "cpu"}, "logging": section}
    )
    try:
        pipemega.build_mesh(config)
    except ConfigError as error:
        return "", str(error)
    log = pipemega.rank_logger()
    log.info("of every rank")
    log.info("of rank 1", ranks=[1])
    log.debug("too low")
    # Close the file, as another run in this process does.
    pipemega.build_mesh(pipemega.load_config({"train_batch_size": 2, "mesh": {"device": "cpu"}}))
    file = Path(folder) / f"rank_{dist.get_rank()}.log"
    return (file.read_text() if file.exists() else ""), ""


def test_each_rank_writes_its_messages_to_its_log_file(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "logs")
    (first, _), (second, _) = pool.run(2, logged, {"log_to_file": folder}, folder)
    assert [line.split(" ", 2)[2] for line in first.splitlines()] == ["rank 0 INFO: of every rank"]
    assert [line.split(" ", 2)[2] for line in second.splitlines()] == [
        "rank 1 INFO: of every rank",
        "rank 1 INFO: of rank 1",
    ]
    only = {"log_to_file": folder + "1", "file_ranks": [1], "level": "warning"}
    assert pool.run(2, logged, only, folder + "1") == [("", "")] * 2
    assert [path.name for path in Path(folder + "1").iterdir()] == ["rank_1.log"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"ranks": [0, 2]}, "logging.ranks has the rank 2, and the ranks of this run are 0 to 1"),
        ({"log_to_file": "/dev/null/logs"}, "logging.log_to_file: rank 0 cannot write /dev/null"),
    ],
)
def test_a_log_that_cannot_be_written_is_the_same_error_on_every_rank(
    pool: RankPool, section: dict[str, Any], message: str
) -> None:
    errors = [error for _, error in pool.run(2, logged, section, "")]
    assert errors[0].startswith(message)
    assert errors == errors[:1] * 2
