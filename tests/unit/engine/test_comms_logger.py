"""Rows and table of `comms_logger`: sums over ranks, bandwidths, one process."""

import pytest

from pipemega.monitor.timers import HostClock
from pipemega.profiling.communication import CommKind, CommRecorder, CommRow, Totals, _rows, table


def row(operation: str, ranks: int, **changes: float) -> CommRow:
    values = {"nbytes": 1e9, "calls": 4, "completed": 4, "seconds": 2.0, "waited": 1.0}
    return CommRow(operation, "data", ranks, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(operation, factor):
    one = row(operation, 4)
    assert one.algorithm_bandwidth == 2e9
    assert one.bus_bandwidth == 2e9 * factor


def test_the_rows_are_sums_over_ranks_and_sizes_by_the_seconds_waited():
    small, large = CommKind("all_reduce", "data", 2, 100), CommKind("all_reduce", "data", 2, 300)
    send = CommKind("send", "pipeline", 2, 50)
    ranks = [
        {small: Totals(1, 1, 0.5, 0.25), large: Totals(1, 1, 1.0, 1.0)},
        {small: Totals(1, 1, 0.5, 0.25), send: Totals(3, 0, 0.0, 0.0)},
    ]
    added = _rows(ranks, by_size=False)
    assert added == [
        CommRow("all_reduce", "data", 2, 500 / 3, 3, 3, 2.0, 1.5),
        CommRow("send", "pipeline", 2, 50.0, 3, 0, 0.0, 0.0),
    ]
    assert [one.nbytes for one in _rows(ranks, by_size=True)] == [300.0, 100.0, 50.0]
    lines = table(added, 2, 2).splitlines()
    assert lines[0].startswith("communication of step 2: 6 calls on 2 ranks, 0.00 MB")
    cells = [line.split() for line in lines[2:]]
    assert cells[0][:7] == ["all_reduce", "data", "2", "167", "3", "0.00", "666.667"]
    assert cells[1] == ["send", "pipeline", "2", "50", "3", "0.00", "-", "-", "-", "-"]


def test_without_communication_the_table_says_so():
    assert table([], 2, 1) == "communication of step 2: none (1 rank(s))"


def test_the_recorder_sums_what_was_waited_for():
    class Ticks:
        time = 0

        def now(self) -> int:
            self.time += 1
            return self.time

        def durations(self, intervals):
            return [(end - start) * 10**9 for start, end in intervals]

    class Work:
        def wait(self) -> bool:
            return True

    recorder = CommRecorder(Ticks(), Ticks())

    def record(result: object, *, on_host: bool = False):
        return recorder("all_gather", 8, None, lambda: result, ranks=2, on_host=on_host)

    waited, _ = record(Work()), record([Work()])
    assert waited.wait()
    assert waited.wait()  # only the first wait counts
    assert record(None, on_host=True) is None
    operation = CommKind("all_gather", "world", 2, 8)
    # A synchronous call is waited for from its start.
    assert recorder.totals() == {operation: Totals(3, 2, 3.0 + 1.0, 1.0 + 1.0)}


def test_operations_that_are_not_selected_are_only_called():
    recorder = CommRecorder(HostClock(), HostClock(), {"send"})
    assert recorder("all_gather", 8, None, lambda: "result", ranks=0, on_host=False) == "result"
    assert recorder.totals() == {}
