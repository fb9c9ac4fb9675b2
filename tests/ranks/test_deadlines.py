"""A rank that does not come: whatever the others wait for has a deadline and a name.

And whatever the rank is at, it is said where it stands.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule, failure, watch
from pipemega.engine import Engine
from tests.ranks.pool import RankPool
from tests.ranks.test_failures import CUT_IN_2, CUT_IN_4, messages, small_config
from tests.ranks.training_run import build, data, settings

DEADLINE, PATIENCE = 0.6, 0.8
# Of the rank that hangs: until all others have given up on it.
ASLEEP = DEADLINE + PATIENCE + 0.6


def nap(*_: Any) -> None:
    time.sleep(ASLEEP)


def shorten_deadlines(engine: Engine) -> None:
    """After the start, which on a busy machine may take longer."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE), group)
    if (transport := engine._executor._transport) is not None:
        transport._timeout = timedelta(seconds=DEADLINE)


def in_a_layer(engine: Engine) -> None:
    def nap_once(*_: Any) -> None:
        hook.remove()
        nap()

    hook = engine.module[0].register_forward_pre_hook(nap_once)


def in_the_optimizer(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(nap)


def in_the_script(engine: Engine) -> None:
    nap()


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
    """One good step; then rank 1 falls asleep at `place`, while all go for `action`."""
    failure._PATIENCE, watch._LOOK_SECONDS = PATIENCE, 0.1
    with watch.watching() if watched else nullcontext():
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
    # The reduction of gradients.
    (2, DATA, "a layer", "train_batch", r"(over data ranks 0, 1|gradients)"),
    # Of activations within a layer.
    (2, TENSOR, "a layer", "train_batch", r"of a layer that is cut over tensor over ranks 0, 1"),
    # In user code, while the others go on to the next step.
    (2, TENSOR, "the optimizer", "train_batch", r"over all ranks 0, 1 in feed\._smallest"),
    (2, TIED, "the script", "save_checkpoint", r"over all ranks 0, 1 in checkpoint\.\w+\.\w+"),
]
MORE_CASES = [
    (2, DATA, "the script", "train_batch", r"over all ranks 0, 1 in feed\._smallest"),
    (2, DATA, "the script", "eval_batch", r"over all ranks 0, 1 in feed\._smallest"),
    (2, TIED, "the script", "load_checkpoint", r"over all ranks 0, 1 in checkpoint\.\w+\.\w+"),
    (4, {"mesh": {"data": 2, "tensor": 2}}, "a layer", "train_batch", r"cut over tensor"),
    (
        4,
        {"mesh": {"pipeline": 4}, "pipeline": {"partition": CUT_IN_4}},
        "the optimizer",
        "train_batch",
        r"over all ranks 0, 1, 2, 3 in feed\._smallest",
    ),
]


@pytest.mark.parametrize(
    ("world", "changes", "place", "action", "met"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MORE_CASES)],
)
def test_a_rank_that_hangs_is_missed_in_a_meeting_that_has_a_name_and_says_where_it_stands(
    pool: RankPool, tmp_path: Any, world: int, changes: Any, place: str, action: str, met: str
) -> None:
    told = messages(pool, world, hang, settings(**changes), place, action, str(tmp_path))
    lines = told[0].splitlines()
    assert re.match(
        r"PeerError: rank 1 did not come within mesh.timeout_seconds, and is alive; missed first "
        r"by rank \d in ",
        lines[0],
    )
    assert re.search(met, lines[0])
    assert "timed out after mesh.timeout_seconds (0.6 s)" in lines[0]
    assert re.match(r"  rank 1 stands (at \S+, )?in nap", lines[1])
    assert re.match(r"      test_deadlines.py, line \d+ in nap: time.sleep\(ASLEEP\)", lines[2])
    # All tell the same, that rank too when it wakes up.
    for message in told:
        assert message.splitlines()[: len(lines) - 1] == lines[: len(lines) - 1]


def test_ranks_that_wait_for_each_other_in_different_meetings_are_told_apart(
    pool: RankPool,
) -> None:
    told = messages(pool, 2, meet_in_two_places)
    for message in told:
        assert "all_reduce of 3 float32 over all ranks 0, 1: " in message
        assert "broadcast of 5 int64 over all ranks 0, 1: " in message


def meet_in_two_places() -> None:
    failure._PATIENCE = PATIENCE
    board = failure.FailureBoard(pipemega.build_mesh(pipemega.load_config(small_config())).world)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE), dist.group.WORLD)
    with board.failing_together("the script"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(3))
        else:
            dist.broadcast(torch.zeros(5, dtype=torch.int64), src=0)


# Data


class Sleepy(torch.utils.data.Dataset[Any]):
    """Never gives sample 26; on one rank only."""

    already_shuffled = True

    def __init__(self, asleep: bool) -> None:
        self.asleep = asleep

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if self.asleep and index == 26:
            nap()
        return torch.ones(4), torch.ones(4)


def train_on_sleepy_data(workers: int) -> None:
    failure._PATIENCE = PATIENCE
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
    config = small_config(mesh={"data": 2}, data={"num_workers": workers})
    engine, *_ = pipemega.initialize(net, config, Sleepy(dist.get_rank() == 1))
    shorten_deadlines(engine)
    assert engine.loader is not None
    engine.loader._timeout = 0.9 * DEADLINE
    for _ in range(4):
        engine.train_batch()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_never_comes_on_one_rank_is_named_by_all(
    pool: RankPool, workers: int
) -> None:
    # In the second step, whose samples 2, 3, 6, 7, 10, 11, 14 and 15 are rank 1's.
    told = messages(pool, 2, train_on_sleepy_data, workers)
    cause = "no data came within 0.54 s: sample 26 of Sleepy is being read"
    assert told[1] == f"DataError: {cause}"
    assert told[0].startswith(f"PeerError: rank 1 failed first: {cause}")


def train_on_a_stuck_iterator() -> None:
    failure._PATIENCE, watch._LOOK_SECONDS = PATIENCE, 0.1

    def batches() -> Iterator[Any]:
        for count in range(12):
            if count == 7 and dist.get_rank() == 1:
                nap()
            yield torch.ones(2, 4), torch.ones(2, 4)

    with watch.watching():
        net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
        engine, *_ = pipemega.initialize(net, small_config(mesh={"data": 2}))
        shorten_deadlines(engine)
        iterator = batches()
        for _ in range(3):
            engine.train_batch(iterator)


def test_an_iterator_of_the_users_that_never_gives_is_named_by_its_line(pool: RankPool) -> None:
    told = messages(pool, 2, train_on_a_stuck_iterator)
    assert "rank 1 stands in nap" in told[0]
    assert re.search(r"test_deadlines.py, line \d+ in batches: nap\(\)", told[0])


def test_a_deadline_of_torchs_own_loader_is_no_lost_connection() -> None:
    def error_from(module: str) -> BaseException:
        names = {"__name__": module}
        exec("def wait(): raise RuntimeError('DataLoader timed out after 5 seconds')", names)
        with pytest.raises(RuntimeError) as caught:
            names["wait"]()  # type: ignore[operator]
        return caught.value

    assert failure.is_loss(error_from("torch.distributed.distributed_c10d"))
    assert not failure.is_loss(error_from("torch.utils.data.dataloader"))
