"""Timers, FLOPs and the logger."""

import logging
import math
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemega.errors import PipemegaError
from pipemega.monitor import (
    MultiTimer,
    breakdown_line,
    breakdown_scalars,
    get_logger,
    gpt_flops_per_token,
    parse_line,
    peak_tflops,
    tflops_per_device,
)
from pipemega.monitor.timers import HISTORY, HostClock


class Clock:
    """A clock that the test advances, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def timers(self) -> MultiTimer:
        return MultiTimer(clock=HostClock(lambda: round(self.now * 1e9)))


def test_a_lap_contains_all_intervals_since_the_last_lap():
    clock = Clock()
    timers = clock.timers()
    for seconds in (1.0, 2.0):
        with timers("forward"):
            clock.now += seconds
        clock.now += 50.0  # between two intervals: not counted
    timers.start("backward")
    clock.now += 4.0
    timers.stop("backward")
    assert timers.lap() == {"forward": 3.0, "backward": 4.0}
    assert timers.lap() == {"forward": 0.0, "backward": 0.0}
    assert timers["forward"].mean == 1.5


def test_a_block_that_raises_is_timed_too():
    clock = Clock()
    timers = clock.timers()

    def fail():
        with timers("forward"):
            clock.now += 1.0
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert timers.lap() == {"forward": 1.0}
    timers.start("forward")  # it was stopped


class Device:
    """A clock of a device; the test fails if the host waits for it too early."""

    def __init__(self) -> None:
        self.time, self.finished, self.reads = 0, False, 0

    def now(self) -> int:
        return self.time

    def passed(self, instant: int) -> bool:
        return self.finished

    def durations(self, intervals):
        assert self.finished or not intervals
        self.reads += len(intervals)
        return [end - start for start, end in intervals]

    times = None


def test_intervals_of_a_device_are_read_when_a_result_is_asked_for():
    device = Device()
    timers = MultiTimer(clock=device)
    for _ in range(2):
        with timers("forward"):
            device.time += 3_000_000_000
    assert not device.reads
    device.finished = True
    assert timers.totals() == {"forward": 6.0}
    assert timers.lap() == {"forward": 6.0}
    assert timers["forward"].mean == 3.0
    assert device.reads == 2


def test_intervals_that_nobody_asks_for_are_forgotten_without_a_wait():
    device = Device()
    timers = MultiTimer(clock=device)
    for number in range(3 * HISTORY):
        device.finished = number > 2 * HISTORY
        with timers("forward"):
            device.time += 1_000_000_000
    assert len(timers["forward"]._unread) == 2 * HISTORY + 1
    assert timers.lap() == {"forward": 3.0 * HISTORY}


def test_disabled_timers_do_not_use_the_clock():
    timers = MultiTimer(clock=None, enabled=False)
    timers._clock = None  # an access would raise an error
    with timers("forward"):
        pass
    timers.stop("backward")
    assert timers.lap() == {}


def test_the_mean_is_over_the_latest_intervals():
    clock = Clock()
    timers = clock.timers()
    for seconds in [100.0] * 5 + [1.0] * HISTORY:
        with timers("forward"):
            clock.now += seconds
    assert timers["forward"].mean == 1.0


def test_starting_twice_and_stopping_a_stopped_timer_are_different_errors():
    timers = MultiTimer()
    timers.start("forward")
    with pytest.raises(PipemegaError, match="timer 'forward' is already running"):
        timers.start("forward")
    with pytest.raises(PipemegaError, match="timer 'backward' is not running"):
        timers.stop("backward")


def test_the_breakdown_is_a_line_of_milliseconds_in_the_order_of_a_step():
    line = breakdown_line(3, {"optimizer": 0.03, "zeal": 0.001, "forward": 0.01, "backward": 0.02})
    assert line == (
        "wall clock step 3 | forward ms 10.00 | backward ms 20.00 | optimizer ms 30.00 | "
        "zeal ms 1.00"
    )
    assert parse_line(line)["backward ms"] == "20.00"


def test_the_breakdown_is_plotted_under_deepspeeds_names():
    assert breakdown_scalars({"forward": 0.25, "optimizer": 0.5, "communication": 1.0}) == {
        "perf/forward_ms": 250.0,
        "perf/optimizer_ms": 500.0,
        "perf/communication_ms": 1000.0,
    }


def test_the_flops_of_gpt_3_match_its_paper():
    # 175 B parameters and 300 B tokens: 3.14e23 FLOPs (Brown et al. 2020, table D.1), which
    # counts 6 per parameter and token and no attention.
    per_token = gpt_flops_per_token(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        ffn_hidden_size=4 * 12288,
        seq_length=0,
        vocab_size=50257,
    )
    assert per_token * 300e9 == pytest.approx(3.14e23, rel=0.01)


def test_llama_with_grouped_queries_and_swiglu_by_hand():
    per_token = gpt_flops_per_token(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_query_groups=1,
        ffn_hidden_size=6,
        seq_length=8,
        vocab_size=10,
        swiglu=True,
    )
    query, output, key_and_value = 4 * 4, 4 * 4, 2 * 4 * 2
    attention = 4 * 8  # two products over on average half of the 8 positions
    feed_forward, head = 3 * 4 * 6, 4 * 10
    assert per_token == 6 * (query + output + key_and_value + attention + feed_forward + head)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4096))
def test_flops_match_the_formula_of_the_megatron_paper(layers, heads, seq):
    # 96 B s l h^2 (1 + s / 6h + V / 16lh) counts recompute (4 passes for 3) and the whole square
    # of scores; so ours is 3/4 of it with s halved, but for the head, which is never recomputed.
    hidden, vocab = 64 * heads, 1000
    ours = gpt_flops_per_token(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        seq_length=seq,
        vocab_size=vocab,
    )
    square = seq / 2 / (6 * hidden)
    theirs = 96 * layers * hidden**2 * (1 + square + vocab / (16 * layers * hidden))
    head = 6 * hidden * vocab
    assert ours == pytest.approx(0.75 * (theirs - head) + head)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("AMD EPYC", None),
    ],
)
def test_the_peak_of_a_device_follows_from_its_name_or_is_unknown(name, peak):
    assert peak_tflops(name) == peak


def test_tflops_are_divided_by_the_number_of_devices():
    assert tflops_per_device(8e12, seconds=2.0, num_devices=4) == 1.0
    assert math.isnan(tflops_per_device(math.nan, 1.0, 1))


@contextmanager
def a_program_without_logging():
    """Remove pytest's root handlers during the test and restore all logging afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("pipemega")
    handlers, own, level = root.handlers[:], ours.handlers[:], ours.level
    root.handlers[:] = []
    try:
        yield root
    finally:
        root.handlers[:], ours.handlers[:] = handlers, own
        ours.setLevel(level)


def test_rank_0_logs_info_and_the_other_ranks_only_warnings(capsys):
    with a_program_without_logging():
        get_logger(0).info("saved")
        get_logger(3).info("saved")
        get_logger(3).warning("slow")
    output = capsys.readouterr()
    assert output.err == "[pipemega] INFO: saved\n[pipemega] rank 3 WARNING: slow\n"
    assert output.out == ""


def test_the_prefix_of_a_warning_has_a_colour(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with a_program_without_logging():
        get_logger(0).info("saved")
        get_logger(3).warning("slow: 2 s")
    assert capsys.readouterr().err == (
        "[pipemega] INFO: saved\n\033[1;33m[pipemega] rank 3 WARNING:\033[0m slow: 2 s\n"
    )


def test_getting_the_logger_twice_does_not_double_its_lines(capsys):
    with a_program_without_logging():
        for _ in range(3):
            logger = get_logger(0)
        logger.info("once")
        logging.getLogger("pipemega.config").warning("from another module")
    assert capsys.readouterr().err == (
        "[pipemega] INFO: once\n[pipemega] WARNING: from another module\n"
    )


def test_a_program_with_its_own_logging_gets_each_line_once(capsys):
    seen = []

    class Own(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    with a_program_without_logging() as root:
        root.addHandler(Own())
        get_logger(0).info("once")
    assert seen == ["once"]
    assert capsys.readouterr().err == ""
