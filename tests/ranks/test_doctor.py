"""The checks of `pipemega doctor` on four gloo ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipemega.config import load
from pipemega.doctor import examination
from pipemega.doctor.attendance import Attendance
from pipemega.doctor.examination import Examination, Options
from tests.ranks.nccl_like import LAZY
from tests.ranks.pool import RankPool

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "mesh": {"pipeline": 2, "tensor": 2, "device": "cpu"},
    "pipeline": {"schedule": "interleaved"},
    "model": {
        "num_layers": 6,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "vocab_size": 64,
    },
    "optimizer": {"type": "AdamW"},
}


def examine(
    config: dict[str, Any] | None, folder: str, silent: int | None = None, seconds: float = 30.0
) -> list[tuple[str, str, str]]:
    """Return the findings of this rank; rank `silent` takes part only before the network."""
    store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attendance = Attendance(store, rank, world_size, seconds, grace=seconds / 2)
    loaded = None if config is None else load(config)
    checks = Examination(attendance, Options(loaded, "", folder, quiet=True))
    if rank == silent:
        checks._check_network = lambda *_: None  # type: ignore[method-assign]
    checks.run()
    json.dumps(checks.measured)
    return [(found.check, found.status, found.text) for found in checks.findings]


@pytest.mark.parametrize("backend", ["gloo", LAZY])
def test_every_connection_of_the_mesh_of_a_config_is_checked(
    pool: RankPool, tmp_path: Path, backend: str
) -> None:
    """Also in the order of operations of NCCL, whose first message between two ranks blocks."""
    found, *others = pool.run(4, examine, CONFIG, str(tmp_path), backend=backend)
    assert others == [[], [], []]
    # On a busy machine a speed may cause a warning.
    slow = [(check, status) for check, status, _ in found if status != "ok"]
    assert all(status == "warning" and check.startswith("bandwidth") for check, status in slow), (
        found
    )
    texts = [text for check, _, text in found if check == "connections"]
    assert texts == [
        "one element over each group of: world, pipeline, tensor",
        # Three boundaries between four stages, two directions, two tensor ranks.
        "one element over each of 12 pipeline connections",
    ]
    checks = [check for check, *_ in found]
    assert {"bandwidth tensor", "bandwidth pipeline", "disk", "plan"} <= set(checks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["gloo", LAZY])
def test_without_a_config_the_world_and_a_ring_are_checked(
    pool: RankPool, tmp_path: Path, backend: str
) -> None:
    found = pool.run(4, examine, None, str(tmp_path), backend=backend)[0]
    texts = [text for check, _, text in found if check == "connections"]
    assert texts == ["one element over each group of: world, data", "one element around 4 ranks"]


def test_a_rank_that_stops_answering_is_named_with_the_step(pool: RankPool, tmp_path: Path) -> None:
    found, other, *_ = pool.run(3, examine, None, str(tmp_path), 2, 0.5)
    assert found[-1] == (
        "ranks",
        "failed",
        "rank 2 of 3 answered before, but not in the step 'process groups'",
    )
    assert other == []


def examine_without_config_on_rank_1(folder: str) -> list[tuple[str, str, str]]:
    return examine(CONFIG if dist.get_rank() != 1 else None, folder)


def test_a_config_that_one_rank_cannot_read_stops_the_checks_of_the_network(
    pool: RankPool, tmp_path: Path
) -> None:
    """Otherwise the ranks would check different connections, and wait for each other."""
    found = pool.run(4, examine_without_config_on_rank_1, str(tmp_path))[0]
    (failed,) = [text for check, status, text in found if status == "failed"]
    assert failed.startswith("the configs of the ranks differ (hashes): ")
    assert failed.endswith("none on rank 1")
    skipped = "not checked: repair configs first"
    assert ("connections", "skipped", skipped) in found


def broken_ring(folder: str) -> list[tuple[str, str, str]]:
    """Return the findings if an element arrives changed on rank 1."""
    original = examination.measurements.exchange_in_ring
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(examination.measurements, "exchange_in_ring", lambda *a: original(*a) + 1)
        return examine(None, folder)


def test_a_changed_element_has_failed_and_names_the_ranks(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(2, broken_ring, str(tmp_path))[0]
    (failed,) = [text for _, status, text in found if status == "failed"]
    assert failed.startswith("rank 1: the element from rank 0 is 1 and not 0: wrong data arrived")
    assert found[-1] == ("connections", "skipped", "the checks after 'ring'")


def test_json_is_not_mixed_with_what_libraries_print_on_stdout():
    """NCCL_DEBUG=INFO makes NCCL print on the descriptor, not through Python."""
    code = (
        "import json, os; from pipemega.cli.doctor import _keep_stdout_for_json as keep; keep(); "
        "os.write(1, b'NCCL INFO ring\\n'); print(json.dumps({'ok': True}), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ok": True}
    assert done.stderr == "NCCL INFO ring\n"
