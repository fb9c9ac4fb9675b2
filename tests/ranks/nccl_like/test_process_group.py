"""The order of operations that the emulation of NCCL allows, and the order in which it hangs."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipemega.distributed import torch_versions
from tests.ranks.nccl_like import BACKENDS, LAZY, SILENT, STRICT
from tests.ranks.pool import RankPool, RanksFailed

# Timeout of operations that have to time out, and of those that have to succeed.
SECONDS, AMPLE = 0.4, 60.0


def errors_of(
    pool: RankPool, backend: str, function: Callable[..., Any], *args: Any
) -> dict[int, str]:
    with pytest.raises(RanksFailed) as failed:
        pool.run(3, function, *args, backend=backend, timeout=20.0)
    return {rank: message for rank, (message, _) in failed.value.errors.items()}


def group_of_all(seconds: float = SECONDS) -> Any:
    group = dist.new_group(
        [0, 1, 2],
        timeout=timedelta(seconds=seconds),
        use_local_synchronization=True,
        group_desc="messages",
    )
    # A rank that returns at once must not break connections that others are establishing.
    dist.barrier()
    return group


def start(*operations: tuple[Any, int], group: Any) -> list[torch.Tensor]:
    """Start sends and receives in this order, wait for all, and return their tensors."""
    tensors = [torch.full((3,), float(dist.get_rank())) for _ in operations]
    try:
        works = [
            call(tensor, peer, group=group)
            for tensor, (call, peer) in zip(tensors, operations, strict=True)
        ]
        for work in works:
            work.wait()
    except RuntimeError:
        # A rank that times out first must not break the connections of others that still wait.
        time.sleep(2 * SECONDS)
        raise
    return tensors


def use_everything() -> list[Any]:
    """Ranks 0 and 1 exchange messages in matching order; all ranks call each collective."""
    rank, results = dist.get_rank(), []
    operations = {0: [(dist.isend, 1), (dist.irecv, 1)], 1: [(dist.irecv, 0), (dist.isend, 0)]}
    if rank in operations:
        messages = start(*operations[rank], group=group_of_all(AMPLE))
        results.append(messages[1 - rank].tolist())
    else:
        group_of_all(AMPLE)
    mine, whole, part = torch.full((3,), 1.0 + rank), torch.empty(9), torch.empty(1)
    dist.all_reduce(mine)
    torch_versions.all_gather_single(whole, mine)
    torch_versions.reduce_scatter_single(part, mine)
    objects = [None] * 3
    dist.all_gather_object(objects, rank)
    left, right = torch.empty(1), torch.full((1,), float(rank))
    exchange = [
        dist.P2POp(dist.isend, right, (rank + 1) % 3),
        dist.P2POp(dist.irecv, left, (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return [*results, whole.tolist(), part.item(), objects, left.item()]


def test_matching_orders_give_the_results_of_gloo(pool: RankPool) -> None:
    expected = pool.run(3, use_everything, backend="gloo")
    assert expected[2] == [[6.0] * 9, 18.0, [0, 1, 2], 1.0]
    for backend in BACKENDS:
        assert pool.run(3, use_everything, backend=backend) == expected


def send_before_receiving(seconds: float = SECONDS) -> None:
    group, rank = group_of_all(seconds), dist.get_rank()
    if rank < 2:
        start((dist.isend, 1 - rank), (dist.irecv, 1 - rank), group=group)


def test_two_ranks_that_both_send_first_time_out_and_name_the_first_operation_of_both(
    pool: RankPool,
) -> None:
    """Gloo separates the two directions."""
    pool.run(3, send_before_receiving, AMPLE, backend="gloo")
    for backend, first in ((STRICT, "send (3,) float32"), (LAZY, "connection of sends")):
        errors = errors_of(pool, backend, send_before_receiving)
        assert sorted(errors) == [0, 1]
        for rank, error in errors.items():
            assert error.startswith("RuntimeError: Timed out waiting 400ms for ")
            assert "first in this queue of nccl_like[messages]: rank 0: " in error
            assert error.count(first) >= 2, error
            assert f"to rank {1 - rank}" in error or backend == LAZY


def receive_before_the_send_of_another_pair(seconds: float = SECONDS) -> None:
    """Rank 0 receives from 1 before it sends to 2, and 1 sends to 0 after it has heard from 2."""
    group, rank = group_of_all(seconds), dist.get_rank()
    chain = {
        0: [(dist.irecv, 1), (dist.isend, 2)],
        1: [(dist.irecv, 2), (dist.isend, 0)],
        2: [(dist.irecv, 0), (dist.isend, 1)],
    }
    start(*chain[rank], group=group)


def test_only_lazy_communicators_block_the_host_before_its_next_operation(pool: RankPool) -> None:
    """Different pairs have different queues: a receive that is posted early blocks no other."""
    pool.run(3, receive_before_the_send_of_another_pair, AMPLE, backend=STRICT)
    errors = errors_of(pool, LAZY, receive_before_the_send_of_another_pair)
    assert sorted(errors) == [0, 1, 2]
    assert "connection of ranks 0, 1 (operation 1), rank 1: nothing" in errors[0]


def batch_of_some_ranks(collective_first: bool) -> None:
    group = group_of_all(AMPLE if collective_first else SECONDS)
    rank, x = dist.get_rank(), torch.ones(2)
    if collective_first:
        dist.all_reduce(x, group=group)
    if rank < 2:
        call = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(call, x, 1 - rank, group)]):
            work.wait()


def first_batch_of_some_ranks() -> None:
    batch_of_some_ranks(collective_first=False)


@pytest.mark.parametrize("backend", [STRICT, LAZY])
def test_the_first_batch_of_a_group_needs_all_of_its_ranks(pool: RankPool, backend: str) -> None:
    pool.run(3, batch_of_some_ranks, True, backend=backend)
    errors = errors_of(pool, backend, first_batch_of_some_ranks)
    assert sorted(errors) == [0, 1]
    first = "connection of all ranks" if backend == LAZY else "batch of send (2,) float32 to rank 1"
    assert f"rank 0: {first} (operation 1), rank 1: " in errors[0]
    assert errors[0].endswith("rank 2: nothing")


def abort_while_others_wait(seconds: float) -> None:
    group, rank = group_of_all(seconds), dist.get_rank()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        for each in (group, dist.group.WORLD):
            each.abort()
        raise ValueError("aborted")
    if rank == 1:
        start((dist.irecv, 0), group=group)
    else:
        dist.broadcast(torch.ones(1), src=0, group=group)


def test_operations_with_a_rank_that_has_aborted_fail_or_stay_pending(pool: RankPool) -> None:
    cases = (STRICT, 10.0, "remote process exited"), (SILENT, SECONDS, "Timed out waiting 400ms")
    for backend, seconds, words in cases:
        errors = errors_of(pool, backend, abort_while_others_wait, seconds)
        assert errors[0] == "ValueError: aborted"
        assert words in errors[1]
        assert words in errors[2]


def use_too_early() -> list[float]:
    """Rank 0 changes what it sends, and rank 1 reads what it receives, before the wait."""
    rank, group = dist.get_rank(), group_of_all(AMPLE)
    tensor, found = torch.full((3,), 5.0), list[float]()
    if rank == 0:
        work = dist.isend(tensor, 1, group=group)
        tensor.add_(1)
        dist.barrier()
        work.wait()
    elif rank == 1:
        dist.barrier()
        version = tensor._version
        work = dist.irecv(tensor, 0, group=group)
        time.sleep(0.1)
        found.append(tensor[0].item())
        work.wait()
        found.append(tensor[0].item())
        found.append(tensor._version - version)
    else:
        dist.barrier()
    return found


def test_data_that_are_used_before_the_wait_are_wrong(pool: RankPool) -> None:
    early, late, changes = pool.run(3, use_too_early, backend=STRICT)[1]
    assert early != early, "the message was there before the wait"
    assert (late, changes) == (6.0, 0)
