"""The folder for checkpoints, and judgement of bandwidths from measured numbers."""

import errno
from pathlib import Path

import pytest

from pipemega.doctor import measurements
from pipemega.doctor.measurements import Rate
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import LocalStorage


def test_a_folder_is_written_and_left_as_it_was(tmp_path: Path):
    measurements.place_marker(str(tmp_path), "token")
    assert measurements.check_folder(str(tmp_path), "token", "node1") > 0
    assert {path.name for path in (tmp_path / "token").iterdir()} == {"rank0", "node1"}
    measurements.remove_marker(str(tmp_path), "token")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_will_be_created_is_tested_in_its_nearest_parent(tmp_path: Path):
    assert measurements.existing_folder(str(tmp_path / "runs" / "new")) == str(tmp_path)
    assert measurements.existing_folder("s3://bucket/runs") == "s3://bucket/runs"


def test_a_folder_that_cannot_be_written_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    measurements.place_marker(str(tmp_path), "token")
    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        measurements.check_folder(str(tmp_path), "token", "node0")


def test_a_folder_that_a_node_cannot_see_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measurements, "_VISIBLE_SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="cannot see a file that rank 0 wrote into") as caught:
        measurements.check_folder(str(tmp_path), "token", "node1")
    assert str(caught.value).endswith(str(tmp_path))


def test_a_checkpoint_that_does_not_fit_has_failed():
    finding = measurements.judge_space("/shared/run", [10**12, 10**9, None], 2 * 10**9)
    assert finding.status == "failed"
    assert finding.text == (
        "/shared/run: written by all nodes, 1.00 GB free; a checkpoint has about 2.00 GB"
    )
    assert "free some space" in finding.remedy
    assert measurements.judge_space("/shared/run", [10**12], 10**9).status == "ok"
    assert measurements.judge_space("s3://bucket/run", [None], 10**9).status == "ok"


def rates(axis, speeds, size=1 << 22):
    """Return what ranks report: two ranks per group, one group per speed."""
    return {
        rank: [
            vars(Rate(axis, (2 * group, 2 * group + 1), bytes_, 1e-5, speed))
            for bytes_ in (1 << 12, size)
        ]
        for group, speed in enumerate(speeds)
        for rank in (2 * group, 2 * group + 1)
    }


@pytest.mark.parametrize("speeds", [[80e9, 82e9, 79e9, 9e9], [80e9, 9e9]])
def test_a_slow_group_is_named(speeds):
    (finding,) = measurements.judge_bandwidth(rates("tensor", speeds), is_nccl=True)
    assert finding.status == "warning"
    last = 2 * len(speeds)
    assert f"ranks {last - 2}-{last - 1} reach only 9.00 GB/s" in finding.text
    (even,) = measurements.judge_bandwidth(rates("tensor", [80e9, 82e9]), is_nccl=True)
    assert even.status == "ok"
    assert "81.0 GB/s (median of 2 groups); small ones take 10.0 us" in even.text


def test_a_bandwidth_that_is_slow_for_gpus_is_a_warning_with_nccl_only():
    (finding,) = measurements.judge_bandwidth(rates("data", [2e8, 2e8]), is_nccl=True)
    assert (finding.status, "NCCL_SOCKET_IFNAME" in finding.remedy) == ("warning", True)
    (finding,) = measurements.judge_bandwidth(rates("data", [2e8, 2e8]), is_nccl=False)
    assert finding.status == "ok"
