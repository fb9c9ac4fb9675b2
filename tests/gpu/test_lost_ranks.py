"""A rank that is killed, raises or hangs: the others end in time and name it.

Also `pipemega doctor` on the devices of this machine. All are started by torchrun.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import rank_functions
from tests.gpu.devices import ROOT, launch, on_meshes, on_ranks, ranks_of

MESHES: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2, "data": 2, "tensor": 2},
]
# Of the waits for other ranks, in the test of a rank that hangs.
TIMEOUT_SECONDS = 30.0
# The ranks collect reports for some seconds, and torchrun looks for ended ranks.
EXTRA_SECONDS = 45.0


def run_with_fault(
    device: str, mesh: dict[str, Any], fault: str, folder: Path, timeout: float
) -> tuple[str, float]:
    """Return the output of all ranks and the seconds from the fault to the end of torchrun."""
    ended = launch(
        ranks_of(mesh),
        rank_functions.train_until_fault,
        folder / "result",
        device=device,
        mesh=mesh,
        victim=ranks_of(mesh) - 1,
        fault=fault,
        folder=str(folder),
        timeout_seconds=timeout,
    )
    assert ended.code == 1, ended.text
    return ended.text, ended.at - float((folder / "fault").read_text())


@on_meshes(*MESHES)
def test_a_killed_rank_is_named_within_seconds(
    device: str, mesh: dict[str, Any], tmp_path: Path
) -> None:
    # A long timeout: the loss of the connection or torchrun's signal must end the run.
    text, seconds = run_with_fault(device, mesh, "kill", tmp_path, timeout=300.0)
    victim = ranks_of(mesh) - 1
    assert re.search(rf"^error: rank {victim} \(pid \d+ on \S+\) disappeared", text, re.M), text
    assert seconds < EXTRA_SECONDS, text


@on_meshes(*MESHES[:1], *MESHES[3:])
def test_the_error_of_one_rank_ends_all_ranks(
    device: str, mesh: dict[str, Any], tmp_path: Path
) -> None:
    text, seconds = run_with_fault(device, mesh, "raise", tmp_path, timeout=300.0)
    assert "ValueError: injected error" in text
    assert seconds < EXTRA_SECONDS, text


@on_meshes(*MESHES)
def test_a_hanging_rank_is_named_after_the_timeout(
    device: str, mesh: dict[str, Any], tmp_path: Path
) -> None:
    text, seconds = run_with_fault(device, mesh, "hang", tmp_path, TIMEOUT_SECONDS)
    victim = ranks_of(mesh) - 1
    words = rf"^error: rank {victim} \(pid \d+ on \S+\) did not respond within mesh.timeout_seconds"
    assert re.search(words, text, re.M), text
    assert TIMEOUT_SECONDS * 0.5 < seconds < TIMEOUT_SECONDS + EXTRA_SECONDS, text


@on_ranks(1, 2, 4, 8)
def test_the_doctor_finds_nothing_that_failed(device: str, num_ranks: int, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 8, "mesh": {"device": device}, "compile": {"enabled": False},
    }  # fmt: skip
    if num_ranks > 1:
        config["mesh"] |= {"pipeline": 2, "tensor": max(1, num_ranks // 4)}
        config["pipeline"] = {"schedule": "interleaved"}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "-m", "pipemega", "doctor", "--json"]
    ended = subprocess.run(
        [*command, "--config", str(tmp_path / "ds.json"), "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = json.loads(ended.stdout)["checks"]
    assert [check for check in checks if check["status"] == "failed"] == []
    if num_ranks > 1:
        assert any("pipeline connections" in check["text"] for check in checks)
