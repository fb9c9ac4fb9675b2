"""Waits of the host for a device, with fake events and a fake clock."""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipemega.distributed import device_waits
from pipemega.distributed.comm_errors import comm_error, describe_comm_error, is_connection_loss
from pipemega.distributed.device_waits import DeviceWaits, nccl_timeout
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Axis, build_mesh, open_axes
from pipemega.distributed.topology import Topology
from pipemega.errors import PipelineError, Stopped


class Event:
    """Occurs at a time of the clock."""

    def __init__(self, device: "Device", occurs_at: float) -> None:
        self._device, self.occurs_at = device, occurs_at

    def query(self) -> bool:
        return self._device.now >= self.occurs_at

    def synchronize(self) -> None:
        raise AssertionError("the host would be blocked without a deadline")


class Device:
    """A device whose stream is busy until a time; the clock advances while the host sleeps."""

    def __init__(self) -> None:
        self.now = self.busy_until = 1000.0
        self.sleep_factor = 1.0

    def compute(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def record(self) -> Event:
        return Event(self, self.busy_until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds * self.sleep_factor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.sleep_factor = 1e3  # tests need few polls
    monkeypatch.setattr(device_waits, "time", SimpleNamespace(sleep=made.sleep))
    waits = DeviceWaits(timedelta(seconds=60), made.record, lambda: made.now)
    monkeypatch.setattr(device_waits, "_waits", waits)
    return made


def named(what: str) -> Callable[[RuntimeError], PipelineError]:
    return lambda cause: comm_error(what, cause)


FOREVER = 1e9


def test_the_first_wait_that_does_not_end_is_named_after_the_timeout(device: Device) -> None:
    began = device.now
    device.compute(1)
    device_waits.mark(named("message 1"))
    device.compute(FOREVER)
    device_waits.mark(named("message 2"))
    device_waits.mark(named("message 3"))
    with pytest.raises(PipelineError) as raised:
        device_waits.synchronize()
    assert str(raised.value) == "message 2: timed out after mesh.timeout_seconds (60 s)"
    assert is_connection_loss(raised.value)
    assert 60 <= device.now - began < 63


def test_a_device_that_computes_for_longer_than_the_timeout_is_waited_for(device: Device) -> None:
    device_waits.mark(named("a message"))
    device.compute(600)
    device_waits.synchronize()
    assert 1600 <= device.now < 1620


def test_the_host_is_late_by_less_than_two_percent(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.sleep_factor = 1.0
    device.compute(0.02)
    device_waits.synchronize()
    assert 0.02 <= device.now - 1000 < 0.0205


def test_a_failure_of_another_rank_ends_the_wait_at_once(device: Device) -> None:
    device.compute(FOREVER)
    device_waits.mark(named("the sum"))
    device_waits.fail("connection closed: another rank has failed")
    for call in (device_waits.synchronize, lambda: device_waits.mark(named("the next"))):
        with pytest.raises(PipelineError) as raised:
            call()
        assert str(raised.value) == "the sum: connection closed: another rank has failed"
        assert is_connection_loss(raised.value)
    assert device.now == 1000


def test_sigterm_ends_a_wait_and_keeps_its_name(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(seconds: float) -> None:
        raise Stopped("stopped by SIGTERM")

    monkeypatch.setattr(device_waits.time, "sleep", stop)
    device.compute(FOREVER)
    device_waits.mark(named("the sum"))
    with pytest.raises(Stopped) as raised:
        device_waits.synchronize()
    assert str(raised.value.__context__) == "the sum: interrupted"


def test_a_host_that_is_blocked_elsewhere_is_freed_by_an_abort(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborts = []

    def abort() -> bool:
        aborts.append(device.now)
        device.now = 2 * FOREVER  # the kernels end, and all events occur
        return True

    monkeypatch.setattr(device_waits, "abort_communicators", abort)
    waits = device_waits._waits
    assert waits is not None
    device.compute(FOREVER)
    device_waits.mark(named("the sum"))
    device.now += 61
    # The host itself would raise the error now.
    assert not waits.abort_if_late()
    device.now += 4
    assert waits.abort_if_late()
    assert aborts == [1065]
    with pytest.raises(PipelineError, match=r"^the sum: timed out .* \(60 s\)$"):
        device_waits.synchronize()


def test_the_place_of_a_wait_is_that_of_its_issue(device: Device) -> None:
    def at(place: str) -> Callable[[], Callable[[Exception], Exception]]:
        return lambda: lambda error: PipelineError(f"{place}: {error}")

    device.compute(FOREVER)
    with device_waits.located_by(at("F2@0")):
        device_waits.mark(named("a message"))
    with pytest.raises(PipelineError, match=r"^F2@0: a message: timed out"):
        device_waits.synchronize()


def test_a_collective_is_named_as_with_gloo(device: Device) -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        world = build_mesh(Topology(data=2), torch.device("cpu")).world
        device.compute(FOREVER)
        all_reduce(torch.zeros(9344), world)
        with pytest.raises(dist.DistError) as raised:
            device_waits.synchronize()
        assert is_connection_loss(raised.value)
        assert describe_comm_error(raised.value) == (
            "all_reduce of 9,344 float32 over all ranks 0, 1: timed out after "
            "mesh.timeout_seconds (60 s)"
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("start", "size"),
    [
        (lambda device: build_mesh(Topology(data=2), device), "2 int64"),
        (
            lambda device: open_axes([Axis("data", (0, 1), 1, dist.group.WORLD)], device),
            "1 float32",
        ),
    ],
    ids=["groups of the caller", "communicators"],
)
def test_a_rank_that_is_silent_at_the_start_is_named(
    device: Device, start: Callable[[torch.device], object], size: str
) -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        device.compute(FOREVER)
        with pytest.raises(dist.DistError) as raised:
            start(torch.device("cpu"))
        assert describe_comm_error(raised.value) == (
            f"all_reduce of {size} over all ranks 0, 1: timed out after mesh.timeout_seconds (60 s)"
        )
    finally:
        dist.destroy_process_group()


def test_marks_that_have_occurred_are_forgotten(device: Device) -> None:
    waits = device_waits._waits
    assert waits is not None
    for _ in range(100):
        device.compute(1)
        device_waits.mark(named("a message"))
        device.now += 1
    assert len(waits._marks) <= 2
    for _ in range(100):
        device.compute(0.01)
        device_waits.mark(named("a message"))
    device_waits.synchronize()
    assert not waits._marks


def test_the_thread_survives_that_the_last_mark_is_removed_while_it_looks(device: Device) -> None:
    class Removed(deque[object]):
        """The thread of the stream removes the mark after the other has seen that there is one."""

        def __bool__(self) -> bool:
            return True

    waits = device_waits._waits
    assert waits is not None
    waits._marks = Removed()  # type: ignore[assignment]
    assert not waits.abort_if_late()


def test_a_run_after_an_abort_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[object] = []
    monkeypatch.setattr(device_waits, "_waits", None)
    monkeypatch.setattr(device_waits, "_thread", None)
    monkeypatch.setattr(device_waits, "_abort_when_late", lambda: watched.append(None))
    for count in (1, 2):
        device_waits.watch_device(timedelta(seconds=60))
        assert device_waits._thread is not None
        device_waits._thread.join()
        assert len(watched) == count


def test_nccl_times_out_after_the_host_and_its_thread() -> None:
    for seconds in (1, 60, 600, 3600):
        own = seconds + device_waits._GRACE_SECONDS + device_waits._CHECK_SECONDS
        assert nccl_timeout(timedelta(seconds=seconds)).total_seconds() > own + 10
