"""A run over two nodes: it trains, sees a cut link on both sides, and goes on when that is mended.

With real torchruns and a c10d rendezvous, on one machine; see docs/multinode.md.
"""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.two_nodes import CONFIG, Node, TwoNodes, can_cut_cables, rows_of

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


def end_well(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.wait(150) == 0, node.output


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows_of(folder / "run" / "metrics.jsonl")}


def test_two_agents_on_two_addresses_train_as_one_run(tmp_path: Path) -> None:
    with TwoNodes(tmp_path) as both:
        nodes = both.start(config(tmp_path))
        end_well(nodes)
        assert not both.left()
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    assert "step 4/4" in nodes[0].output + nodes[1].output


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    with TwoNodes(folder) as both:
        end_well(both.start(config(folder, train_steps=steps)))
    return losses(folder)


def resume(both: TwoNodes, folder: Path, steps: int) -> None:
    end_well(
        both.start(config(folder, train_steps=steps), "--set", f"checkpoint.load={folder}/run")
    )


@cable
@pytest.mark.faults
@pytest.mark.sweep
def test_a_cut_link_is_told_on_both_sides_within_the_deadline_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    deadline = 8.0
    with TwoNodes(tmp_path, namespaces=True) as both:
        nodes = both.start(config(tmp_path, deadline, train_steps=100_000))
        nodes[0].wait_for("step 6/", 180)
        both.cut_the_cable()
        cut = time.monotonic()
        for node in nodes:
            node.wait_for("error: rank", deadline + 10)
        told = time.monotonic() - cut
        # The ranks end by themselves; each torchrun may take longer to give up on the other one.
        while both.ranks_left():
            assert time.monotonic() - cut < deadline + 25
            time.sleep(0.1)
        ended = time.monotonic() - cut
        both.kill(0, 1)
        for rank, node in enumerate(nodes):
            said = re.search(rf"^error: rank {rank}: .*", node.output, re.MULTILINE)
            assert said is not None
            assert "mesh.timeout_seconds" in said[0]
        print(f"told by both after {told:.1f} s, ended after {ended:.1f} s")
        both.mend_the_cable()
        last = max(losses(tmp_path))
        resume(both, tmp_path, last + 4)
        assert not both.left()
    assert losses(tmp_path) == undisturbed(tmp_path / "undisturbed", last + 4)


@pytest.mark.faults
@pytest.mark.sweep
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_loses_power_is_missed_by_the_other_and_the_run_resumes(
    tmp_path: Path, killed: int
) -> None:
    with TwoNodes(tmp_path) as both:
        nodes = both.start(config(tmp_path, train_steps=100_000))
        nodes[0].wait_for("step 6/", 180)
        both.kill(killed)
        survivor = nodes[1 - killed]
        seconds = survivor.wait_for("error: rank", 30)
        assert survivor.wait(60) != 0
        words = r"^error: rank \d: .*(no sign of life from rank|the store of the ranks)"
        assert re.search(words, survivor.output, re.MULTILINE)
        print(f"told by the survivor after {seconds:.1f} s")
        last = max(losses(tmp_path))
        resume(both, tmp_path, last + 2)
    assert losses(tmp_path) == undisturbed(tmp_path / "undisturbed", last + 2)
