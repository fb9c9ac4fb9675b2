"""A run over two nodes: it trains, sees a cut link on both sides, and goes on when that is mended.

With real torchruns and a c10d rendezvous, on one machine; see docs/long_runs.md.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.fault_tolerance.two_nodes import (
    CONFIG,
    ROOT,
    Node,
    TwoNodes,
    can_cut_cables,
    rows_of,
)

cable = pytest.mark.skipif(
    not can_cut_cables(), reason="needs the right to make network namespaces (ip netns add)"
)


def config(folder: Path, timeout: float = 60.0, **training: Any) -> dict[str, Any]:
    return {
        **CONFIG,
        "mesh": {**CONFIG["mesh"], "timeout_seconds": timeout},
        "training": {**CONFIG["training"], **training},
        "checkpoint": {"save": str(folder / "run"), "interval": 2},
    }


def wait_for_success(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.wait(150) == 0, node.output


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows_of(folder / "run" / "metrics.jsonl")}


def train_in_one_process(folder: Path) -> None:
    folder.mkdir()
    settings = config(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(settings | {"mesh": {**settings["mesh"], "pipeline": 1}}))
    script = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--config", str(file)]
    subprocess.run(script, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


@pytest.mark.sweep
def test_two_torchruns_on_two_addresses_train_as_one_process(tmp_path: Path) -> None:
    with TwoNodes(tmp_path) as both:
        nodes = both.start(config(tmp_path))
        wait_for_success(nodes)
        assert not both.left()
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    assert "step 4/4" in nodes[0].output + nodes[1].output
    one_process = tmp_path / "one_process"
    train_in_one_process(one_process)
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=1e-6)


def losses_without_fault(folder: Path, steps: int) -> dict[int, float]:
    with TwoNodes(folder) as both:
        wait_for_success(both.start(config(folder, train_steps=steps)))
    return losses(folder)


def resume(both: TwoNodes, folder: Path, steps: int) -> None:
    wait_for_success(
        both.start(config(folder, train_steps=steps), "--set", f"checkpoint.load={folder}/run")
    )


@cable
@pytest.mark.faults
@pytest.mark.sweep
def test_a_cut_link_is_reported_on_both_sides_after_the_timeout_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    deadline = 8.0
    with TwoNodes(tmp_path, namespaces=True) as both:
        nodes = both.start(config(tmp_path, deadline, train_steps=100_000))
        nodes[0].wait_for("step 6/", 180)
        both.cut_the_cable()
        cut = time.monotonic()
        for node in nodes:
            node.wait_for("\nerror: rank", deadline + 10)
        told = time.monotonic() - cut
        # Only the ranks end in time; each torchrun may wait longer for the other one.
        while both.ranks_left():
            assert time.monotonic() - cut < deadline + 25
            time.sleep(0.1)
        ended = time.monotonic() - cut
        both.kill(0, 1)
        for node in nodes:
            printed = re.search(r"^error: rank \d.*", node.output, re.MULTILINE)
            assert printed is not None
            assert "mesh.timeout_seconds" in printed[0]
        print(f"told by both after {told:.1f} s, ended after {ended:.1f} s")
        both.mend_the_cable()
        last = max(losses(tmp_path))
        resume(both, tmp_path, last + 4)
        assert not both.left()
    assert losses(tmp_path) == losses_without_fault(tmp_path / "losses_without_fault", last + 4)


@pytest.mark.faults
@pytest.mark.sweep
@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_node_reports_a_node_without_power_and_the_run_resumes(
    tmp_path: Path, killed: int
) -> None:
    with TwoNodes(tmp_path) as both:
        nodes = both.start(config(tmp_path, train_steps=100_000))
        nodes[0].wait_for("step 6/", 180)
        both.kill(killed)
        survivor = nodes[1 - killed]
        seconds = survivor.wait_for("error: rank", 30)
        assert survivor.wait(60) != 0
        words = r"^error: rank \d.*(disappeared|the store of the process group)"
        assert re.search(words, survivor.output, re.MULTILINE)
        print(f"told by the survivor after {seconds:.1f} s")
        last = max(losses(tmp_path))
        resume(both, tmp_path, last + 2)
    assert losses(tmp_path) == losses_without_fault(tmp_path / "losses_without_fault", last + 2)
