"""Timeouts: the error names the collective, and the location of the rank that does not respond."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.checkpoint.async_save import BackgroundTask
from pipemega.distributed import comm_errors
from pipemega.distributed.mesh import Axis, Mesh, new_group
from pipemega.engine.engine import Engine
from pipemega.errors import PipelineError
from pipemega.fault_tolerance import error_propagation, watchdog
from pipemega.optimizer import post_validation
from tests.ranks.fault_tolerance.test_failures import CUT_IN_2, CUT_IN_4, messages, small_config
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import build, data, settings
from tests.sampling import some_cases

DEADLINE, COLLECT = 0.6, 0.8
# How long the rank hangs: until all others have timed out.
ASLEEP = DEADLINE + COLLECT + 0.6


def sleep(*_: Any) -> None:
    time.sleep(ASLEEP)


def shorten_deadlines(engine: Engine) -> None:
    """Set short timeouts after start-up, which may take longer on a busy machine."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE), group)
    if (transport := engine.steps.executor._transport) is not None:
        transport._timeout = timedelta(seconds=DEADLINE)


def in_a_layer(engine: Engine) -> None:
    def sleep_once(*_: Any) -> None:
        hook.remove()
        sleep()

    hook = engine.module[0].register_forward_pre_hook(sleep_once)


def in_the_optimizer(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(sleep)


def in_the_script(engine: Engine) -> None:
    sleep()


PLACES = {"a layer": in_a_layer, "the optimizer": in_the_optimizer, "the script": in_the_script}
ACTIONS: dict[str, Callable[[Engine, str], Any]] = {
    "train_batch": lambda engine, folder: [
        engine.train_batch(data(engine, step)) for step in range(2)
    ],
    "eval_batch": lambda engine, folder: engine.eval_batch(data(engine, 0)),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
}


def hang(
    config: dict[str, Any], place: str, action: str, folder: str, watched: bool = True
) -> None:
    """Run one step without a fault; then rank 1 hangs at `place` in `action`."""
    error_propagation._COLLECT_SECONDS, watchdog._POLL_SECONDS = COLLECT, 0.1
    with watchdog.watchdog() if watched else nullcontext():
        engine = build(config)
        engine.train_batch(data(engine, 0))
        if action == "load_checkpoint":
            engine.save_checkpoint(folder)
        shorten_deadlines(engine)
        if engine.mesh.rank == 1:
            PLACES[place](engine)
        ACTIONS[action](engine, folder)


DATA = {"mesh": {"data": 2}}
TENSOR = {"mesh": {"tensor": 2}}
TIED = {
    "mesh": {"pipeline": 2},
    "pipeline": {"partition": CUT_IN_2},
    "model": {"untie_embeddings_and_output_weights": False},
}
CASES = [
    # In the gradient reduction.
    (2, DATA, "a layer", "train_batch", r"(over data ranks 0, 1|gradients)"),
    # In the all-reduce of activations within a layer.
    (2, TENSOR, "a layer", "train_batch", r"of a layer sharded over tensor over ranks 0, 1"),
    # In user code, while the other ranks wait in the next step.
    (
        2,
        TENSOR,
        "the optimizer",
        "train_batch",
        r"over all ranks 0, 1 in engine\.run\.batch_reader\.",
    ),
    (2, TIED, "the script", "save_checkpoint", r"over all ranks 0, 1 in checkpoint\.\w+\.\w+"),
]
MORE_CASES = [
    (2, DATA, "the script", "train_batch", r"over all ranks 0, 1 in engine\.run\.batch_reader\."),
    (2, DATA, "the script", "eval_batch", r"over all ranks 0, 1 in engine\.run\.batch_reader\."),
    (2, TIED, "the script", "load_checkpoint", r"over all ranks 0, 1 in checkpoint\.\w+\.\w+"),
    (4, {"mesh": {"data": 2, "tensor": 2}}, "a layer", "train_batch", r"sharded over tensor"),
    (
        4,
        {"mesh": {"pipeline": 4}, "pipeline": {"partition": CUT_IN_4}},
        "the optimizer",
        "train_batch",
        r"over all ranks 0, 1, 2, 3 in engine\.run\.batch_reader\.",
    ),
]


@pytest.mark.parametrize(
    ("world", "changes", "place", "action", "met"),
    some_cases([*CASES, *MORE_CASES], 1, 3),
)
def test_a_timeout_names_the_collective_and_the_location_of_the_hanging_rank(
    pool: RankPool, tmp_path: Any, world: int, changes: Any, place: str, action: str, met: str
) -> None:
    raised = messages(pool, world, hang, settings(**changes), place, action, str(tmp_path))
    lines = raised[0].splitlines()
    assert re.match(
        r"PeerError: rank 1 is alive but did not respond within mesh.timeout_seconds; "
        r"first noticed by rank \d in ",
        lines[0],
    )
    assert re.search(met, lines[0])
    assert "timed out after mesh.timeout_seconds (0.6 s)" in lines[0]
    assert re.match(r"  rank 1 is (at \S+, )?in sleep", lines[1])
    assert re.match(r"      test_deadlines.py, line \d+ in sleep: time.sleep\(ASLEEP\)", lines[2])
    # All ranks report the same, also the hanging one when it continues.
    for message in raised:
        assert message.splitlines()[: len(lines) - 1] == lines[: len(lines) - 1]


def test_ranks_that_wait_in_different_collectives_report_each_of_them(
    pool: RankPool,
) -> None:
    raised = messages(pool, 2, wait_in_different_collectives)
    for message in raised:
        assert "all_reduce of 3 float32 over all ranks 0, 1: " in message
        assert "broadcast of 5 int64 over all ranks 0, 1: " in message


def wait_in_different_collectives() -> None:
    error_propagation._COLLECT_SECONDS = COLLECT
    pipemega.build_mesh(pipemega.load_config(small_config()))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE), dist.group.WORLD)
    with error_propagation.failure_reporter().propagate_errors("the script"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(3))
        else:
            dist.broadcast(torch.zeros(5, dtype=torch.int64), src=0)


# Process groups


def make_axis(world: Axis, timeout: timedelta) -> None:
    new_group(world.ranks, torch.device("cpu"), timeout, "tensor")


def make_sums(world: Axis, timeout: timedelta) -> None:
    post_validation._separate_group(replace(Mesh.single(), world=world, timeout=timeout))


def make_saves(world: Axis, timeout: timedelta) -> None:
    BackgroundTask(world, timeout).connect()


def wait_for_a_group(make: Callable[[Axis, timedelta], None]) -> tuple[str, bool]:
    rank = dist.get_rank()
    if rank == 1:
        return "", True
    with pytest.raises(PipelineError) as error:
        make(Axis("world", (0, 1), rank, dist.group.WORLD), timedelta(seconds=0.3))
    return str(error.value), comm_errors.is_connection_loss(error.value)


@pytest.mark.parametrize(
    ("make", "name"),
    [(make_axis, "tensor"), (make_sums, "post-validation"), (make_saves, "checkpoint")],
)
def test_a_rank_that_waits_for_a_process_group_names_itself_the_group_and_its_ranks(
    pool: RankPool, make: Callable[[Axis, timedelta], None], name: str
) -> None:
    """torch raised "Wait timeout", which did not count as a lost connection.

    So pipemega.run() reported it as the cause, and not the rank that was missing.
    """
    (message, is_lost), _ = pool.run(2, wait_for_a_group, make)
    assert message == (
        f"rank 0 in the creation of process group {name!r} over ranks 0, 1: timed out after "
        "mesh.timeout_seconds"
    )
    assert is_lost


# Data


class HangingDataset(torch.utils.data.Dataset[Any]):
    """Hangs at sample 26, on one rank only."""

    already_shuffled = True
    # So that `num_workers` are threads, which can name the sample.
    deterministic = True

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if self.hangs and index == 26:
            sleep()
        return torch.ones(4), torch.ones(4)


def train_on_hanging_data(workers: int) -> None:
    error_propagation._COLLECT_SECONDS = COLLECT
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
    config = small_config(mesh={"data": 2}, data={"num_workers": workers})
    engine, *_ = pipemega.initialize(net, config, HangingDataset(dist.get_rank() == 1))
    shorten_deadlines(engine)
    assert engine.loader is not None
    engine.loader._options = replace(engine.loader._options, timeout_seconds=0.9 * DEADLINE)
    for _ in range(4):
        engine.train_batch()


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_name_a_sample_that_hangs_on_one_rank(pool: RankPool, workers: int) -> None:
    # In the second step, whose samples 2, 3, 6, 7, 10, 11, 14 and 15 are rank 1's.
    raised = messages(pool, 2, train_on_hanging_data, workers)
    cause = (
        "no data came within 0.54 s: sample 26 of HangingDataset is being read; if the data is "
        "only slow, raise mesh.timeout_seconds"
    )
    assert raised[1] == f"DataError: {cause}"
    assert raised[0].startswith(f"PeerError: rank 1 failed first: {cause}")


def train_on_a_stuck_iterator() -> None:
    error_propagation._COLLECT_SECONDS, watchdog._POLL_SECONDS = COLLECT, 0.1

    def batches() -> Iterator[Any]:
        for count in range(12):
            if count == 7 and dist.get_rank() == 1:
                sleep()
            yield torch.ones(2, 4), torch.ones(2, 4)

    with watchdog.watchdog():
        net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
        engine, *_ = pipemega.initialize(net, small_config(mesh={"data": 2}))
        shorten_deadlines(engine)
        iterator = batches()
        for _ in range(3):
            engine.train_batch(iterator)


def test_a_hanging_user_iterator_is_named_by_its_line(pool: RankPool) -> None:
    raised = messages(pool, 2, train_on_a_stuck_iterator)
    assert "rank 1 is in sleep" in raised[0]
    assert re.search(r"test_deadlines.py, line \d+ in batches: sleep\(\)", raised[0])


def test_a_timeout_of_torchs_dataloader_is_not_a_lost_connection() -> None:
    def error_from(module: str) -> BaseException:
        names = {"__name__": module}
        exec("def wait(): raise RuntimeError('DataLoader timed out after 5 seconds')", names)
        with pytest.raises(RuntimeError) as caught:
            names["wait"]()  # type: ignore[operator]
        return caught.value

    assert comm_errors.is_connection_loss(error_from("torch.distributed.distributed_c10d"))
    assert not comm_errors.is_connection_loss(error_from("torch.utils.data.dataloader"))
