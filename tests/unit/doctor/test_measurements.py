"""Judgement of disks, bandwidths and clocks from measured numbers."""

import errno
from pathlib import Path

import pytest

from pipemega.doctor import measurements
from pipemega.doctor.measurements import Rate
from pipemega.profiling.step_trace import ClockSample
from pipemega.storage.filesystem import LocalStorage

SIZE = 10**6


def disk(**values):
    return {"size": SIZE, "shared": True, "free": 10**12, "write": 2e9, "read": 4e9} | values


def judged(*results, checkpoint=None, error=""):
    hosts = {f"node{i}": result for i, result in enumerate(results)}
    return list(measurements.judge_disk("/shared/run", error, hosts, checkpoint))


def test_a_disk_is_written_read_and_left_as_it_was(tmp_path: Path):
    measurements.place_marker(str(tmp_path), "token")
    result = measurements.measure_disk(str(tmp_path), "token", 1, 3 * 2**20 + 5)
    assert result["shared"]
    assert min(result["write"], result["read"], result["free"]) > 0
    assert [path.name for path in (tmp_path / "token").iterdir()] == ["rank0"]
    measurements.remove_marker(str(tmp_path), "token")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_will_be_created_is_tested_in_its_nearest_parent(tmp_path: Path):
    assert measurements.existing_folder(str(tmp_path / "runs" / "new")) == str(tmp_path)
    assert measurements.existing_folder("s3://bucket/runs") == "s3://bucket/runs"


def test_a_full_disk_is_named_with_its_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    measurements.place_marker(str(tmp_path), "token")
    monkeypatch.setattr(LocalStorage, "create", full)
    result = measurements.measure_disk(str(tmp_path), "token", 0, SIZE)
    result["free"] = 12_000
    (finding,) = judged(result)
    assert finding.status == "failed"
    assert finding.text == (
        "node0 cannot write and read 1.00 MB in /shared/run: No space left on device; 12.0 KB free"
    )
    assert "free some space" in finding.remedy


def test_a_slow_disk_is_a_warning_with_the_time_of_a_checkpoint():
    fine, slow = disk(), disk(write=20e6)
    assert [f.status for f in judged(fine, fine)] == ["ok"]
    (finding,) = judged(slow, disk(write=80e6), checkpoint=10**9)
    assert finding.status == "warning"
    assert "writes 20.0 MB/s" in finding.text
    assert "a checkpoint of about 1.00 GB takes about 10.0 s" in finding.text
    assert "checkpoint.async" in finding.remedy


def test_a_folder_that_a_node_cannot_see_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measurements, "_VISIBLE_SECONDS", 0.1)
    hidden = measurements.measure_disk(str(tmp_path), "token", 1, SIZE)
    finding, other = judged(disk(), hidden)
    assert finding.text == "node1 cannot see a file that rank 0 wrote into /shared/run"
    assert other.status == "ok"


def test_a_checkpoint_that_does_not_fit_and_a_folder_without_rights_have_failed():
    (finding,) = judged(disk(free=10**9), checkpoint=2 * 10**9)
    assert finding.status == "failed"
    (finding,) = judged(error="Permission denied")
    assert finding.text == "/shared/run: Permission denied"


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


def samples(offset):
    return [ClockSample(at + offset, at + offset + 2_000_000) for at in range(0, 10**9, 10**8)]


def test_a_clock_that_is_off_is_named_with_its_direction():
    hosts = {"node0": [0], "node1": [1], "node2": [2]}
    by_rank = {0: samples(0), 1: samples(3 * 10**9), 2: samples(-(10**6))}
    finding = measurements.judge_clocks(by_rank, hosts)
    assert finding.status == "warning"
    assert finding.text == "node1 is 3 s ahead of node0"
    assert "chrony" in finding.remedy
    good = measurements.judge_clocks(
        {0: samples(0), 1: samples(10**6)}, {"node0": [0], "node1": [1]}
    )
    assert (good.status, good.text) == ("ok", "at most 1.00 ms apart (+- 2.00 ms)")
