"""A rank that hangs in an instruction: all ranks end with a message that shows every position."""

import re
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.engine.engine import Engine
from pipemega.errors import PeerError, PipelineError
from pipemega.fault_tolerance import error_propagation, watchdog
from pipemega.pipeline.plan.instructions import Instruction
from tests.ranks.late_device import late_device
from tests.ranks.pool import RankPool, RanksFailed

DEADLINE, COLLECT = 0.8, 1.0
# How long the rank hangs: until all others have timed out.
ASLEEP = DEADLINE + COLLECT + 0.5


def engine_of(pipeline: int, schedule: str, num_microbatches: int = 4) -> Engine:
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(8)]
    net = PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": num_microbatches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "mesh": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
    }
    return pipemega.initialize(net, config)[0]


def train_with_a_hang(
    pipeline: int, schedule: str, hang: str, sleep: float = ASLEEP, late: bool = False
) -> None:
    """Run one step without a fault, and one in which a rank hangs in instruction `hang`.

    Args:
        late: only streams wait for messages and reductions, as with NCCL.
    """
    error_propagation._COLLECT_SECONDS = COLLECT
    engine = engine_of(pipeline, schedule)
    data = [(torch.ones(2, 4), torch.ones(2, 4))] * 4
    engine.train_batch(iter(data))
    transport, run_kind = engine.steps.executor._transport, dict(engine.steps.executor._handlers)
    assert transport is not None
    # Not before: start-up may take longer on a busy machine.
    transport._timeout = type(transport._timeout)(seconds=DEADLINE)
    faulty = Instruction.parse(hang)
    real = run_kind[faulty.kind]

    def hang_once(step: Instruction) -> None:
        if step == faulty:
            time.sleep(sleep)
        real(step)

    engine.steps.executor._handlers = {**run_kind, faulty.kind: hang_once}
    deadline = timedelta(seconds=DEADLINE)
    with late_device(deadline) if late else nullcontext():
        engine.train_batch(iter(data))


def errors_of(pool: RankPool, pipeline: int, *args: Any) -> list[str]:
    """Return the error of each rank; check that all raise one in time."""
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(pipeline, train_with_a_hang, pipeline, *args, timeout=30.0)
    assert time.monotonic() - started < ASLEEP + 15.0
    errors = caught.value.errors
    assert sorted(errors) == list(range(pipeline)), "a rank did not raise"
    return [errors[rank][0] for rank in range(pipeline)]


# Instructions in the middle of the step, in which their rank hangs.
HANGS = {
    (2, "1f1b"): ("F2@0",),
    (4, "1f1b"): ("B1@2", "SG1@3"),
    (4, "zb-v"): ("W0@5",),
}
MORE_HANGS = {
    (2, "1f1b"): ("B1@1", "SA2@0", "RA2@1", "SG1@1", "RG1@0"),
    (4, "1f1b"): ("F2@1", "RA2@2", "SA2@1", "RG1@1"),
    (2, "zb-v"): ("F1@1", "I1@3", "W1@2", "SA1@0", "RA1@3", "SG1@1", "RG1@0"),
    (4, "zb-v"): ("F1@2", "I1@5", "RA1@6", "SA2@1", "SG1@6", "RG0@4"),
}


def cases(table: dict[tuple[int, str], tuple[str, ...]], *marks: Any) -> list[Any]:
    rows = [(*run, hang) for run, hangs in table.items() for hang in hangs]
    return [pytest.param(*row, marks=marks) for row in rows]


@pytest.mark.parametrize(
    ("pipeline", "schedule", "hang"), [*cases(HANGS), *cases(MORE_HANGS, pytest.mark.sweep)]
)
def test_after_a_hang_in_any_instruction_all_ranks_name_it_and_show_the_table(
    pool: RankPool, pipeline: int, schedule: str, hang: str
) -> None:
    stage = Instruction.parse(hang).stage
    silent = min(stage, 2 * pipeline - 1 - stage) if schedule == "zb-v" else stage
    check_report(errors_of(pool, pipeline, schedule, hang), pipeline, silent, hang)


@pytest.mark.parametrize("hang", ["F2@0", pytest.param("B1@1", marks=pytest.mark.sweep)])
def test_the_report_is_the_same_where_only_the_streams_wait(pool: RankPool, hang: str) -> None:
    messages = errors_of(pool, 2, "1f1b", hang, ASLEEP, True)
    check_report(messages, 2, Instruction.parse(hang).stage, hang)


def check_report(messages: list[str], pipeline: int, silent: int, hang: str) -> None:
    """Check the messages of all ranks after rank `silent` hung in instruction `hang`."""
    lines = messages[(silent + 1) % pipeline].splitlines()
    assert re.match(
        rf"PeerError: no response from rank {silent}: killed, crashed, hanging, or slower than "
        rf"mesh.timeout_seconds; first noticed by rank \d in .* \(\w+@\d\): pipeline rank \d "
        rf"waited for the \w+ of micro-batch \d from stage \d on rank \d \(S\w+@\d\): "
        # "Connection closed" if the first rank broke its connections before it could write.
        rf"(timed out after mesh.timeout_seconds \({DEADLINE} s\)|Connection closed by peer)",
        lines[0],
    )
    known = re.match(
        rf"  rank {silent} has finished S\S+ but not (S\S+), which rank \d waits for: it is at "
        rf"one of (.*)",
        lines[1],
    )
    assert known is not None
    # Other ranks cannot see a weight backward or a posted receive: several candidates are shown.
    assert hang in known[2].split()
    assert known[2].endswith(known[1])
    table = lines[2 : 2 + pipeline]
    assert [row.split()[:2] for row in table] == [["rank", str(r)] for r in range(pipeline)]
    assert all(row.count(">") == 1 for row in table)
    assert f"> {known[2].split()[0]} " in table[silent]
    # All ranks report the same error, and add their own position.
    for message in messages:
        assert message.splitlines()[: 2 + pipeline] == lines[: 2 + pipeline]


def test_a_rank_that_continues_after_the_timeout_is_shown_at_its_position(pool: RankPool) -> None:
    messages = errors_of(pool, 2, "1f1b", "F2@0", DEADLINE + 0.2)
    assert "timed out after mesh.timeout_seconds" in messages[0]
    rows = [line.strip() for line in messages[0].splitlines() if line.startswith("    rank")]
    assert len(rows) == 2
    assert "> F2@1 " in rows[1]
    assert ">" in rows[0]
    assert "no response from rank" not in messages[0]


def train_with_an_error() -> float:
    """Rank 1 raises an error in F2@1; return after how long this rank has ended."""
    watchdog._POLL_SECONDS = 0.1
    engine = engine_of(2, "1f1b")
    batch = [(torch.ones(2, 4), torch.ones(2, 4))] * 4
    calls = iter(range(8))

    def fail(*_: Any) -> None:
        if next(calls) == 2:
            raise ValueError("injected error")

    if engine.mesh.rank == 1:
        engine.module[0].register_forward_pre_hook(fail)
    started = time.monotonic()
    expected = PipelineError if engine.mesh.rank == 1 else PeerError
    with (
        watchdog.watchdog(),
        late_device(timedelta(seconds=60)),
        pytest.raises(expected) as raised,
    ):
        engine.train_batch(iter(batch))
    message = "forward of micro-batch 2 at stage 1 (F2@1): ValueError: injected error"
    if engine.mesh.rank == 0:
        message = (
            f"rank 1 failed first: {message}\n  (rank 0 was stopped by this in backward of "
            "micro-batch 2 at stage 0 (B2@0): pipeline rank 0 waited for the gradient of "
            "micro-batch 2 from stage 1 on rank 1 (SG2@1): connection closed: another rank has "
            "failed)"
        )
    assert str(raised.value) == message
    return time.monotonic() - started


def test_where_only_the_streams_wait_the_watchdog_passes_on_an_error(pool: RankPool) -> None:
    assert max(pool.run(2, train_with_an_error)) < 20
