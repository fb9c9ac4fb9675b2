"""A torch.distributed backend for CPU tensors that orders operations as NCCL does.

NCCL's order, with ProcessGroupNCCL of torch 2.13, groups not bound to a device:

    isend, irecv        one queue per (group, pair of ranks), for both directions, in the order of
                        issue. Tags have no effect. Nothing is buffered: a send completes when the
                        matching receive is the first in the queue of its rank.
    collectives, and    one queue per group, in the order of issue. The first entry creates the
    batch_isend_irecv   communicator of the group, which every rank of the group has to join.

So two ranks that both send first in one group wait forever, and so does a batch that is the first
operation of a group and that some of its ranks do not call. A wait that times out names the first
operation of the queue on each of its ranks. There are three backends:

    nccl_like           the communicators of pairs exist from the start
    nccl_like_lazy      the host blocks, as it does in NCCL, in the first operation of a (group,
                        pair) until the peer is in its first one, also in the first operation of
                        each direction, and in the first collective or batch of a group
    nccl_like_silent    as nccl_like, but operations with a rank that was killed or has aborted its
                        groups stay pending until they time out, as over NVLink; with the other
                        backends they fail, as over a network

The data are sent by gloo, so results are bitwise those of gloo. Unlike with NCCL, `wait` blocks the
host. They arrive late: a tensor that is received has NaN from the call until `wait`, and a tensor
that is sent is read when the peer takes it. So code that reads or changes one of them too early has
other results.

torch cannot call a Python subclass of its `Backend`, so this is a Python subclass of
`ProcessGroup`. `batch_isend_irecv` does not group operations for those, so it is replaced.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.nccl_like import BACKENDS, LAZY, STRICT
from tests.ranks.nccl_like.queues import Operation, Queue

_FOREVER = timedelta(days=1)
_NEVER_SENT = 0x7FFFFFFF  # a tag of gloo
_CPU = torch.device("cpu")

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "allgather", "gather",
    "scatter", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall",
    "all_to_all_single",
    # Names before torch 2.13.
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip


class _World:
    """What all groups of a process share: connections between the ranks, and the queues.

    Args:
        store: the store of the default process group.
        rank: the rank of this process.
        size: number of ranks.
    """

    current: ClassVar["_World"]

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.groups: list[NcclLike] = []
        self._store = store
        # Sends nothing before the receive is posted, as is needed here.
        prefixed = dist.PrefixStore("connections", store)
        self._gloo = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=60))

    def send(self, tensor: Tensor, to: int, key: str) -> dist.Work:
        """Start to send; complete when rank `to` has called `receive` with the same key."""
        return self._gloo.send([tensor], to, _tag(key, tensor))

    def receive(self, tensor: Tensor, source: int, key: str) -> dist.Work:
        return self._gloo.recv([tensor], source, _tag(key, tensor))

    def meet(self, others: Sequence[int], key: str) -> None:
        """Block until all `others` are in `meet` with the same key, too."""
        mine = torch.zeros(1, dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in others]
        works = [self.send(mine, other, key) for other in others]
        works += [self.receive(t, other, key) for t, other in zip(theirs, others, strict=True)]
        for work in works:
            work.wait(_FOREVER)

    def publish_heads(self) -> None:
        """Publish the first operation of each queue of this rank."""
        queues = [queue for group in self.groups for queue in group.queues]
        heads = {queue.key: queue.head() for queue in queues}
        self._store.set(f"heads/{self.rank}", json.dumps(heads))

    def heads_of(self, rank: int) -> dict[str, str | None] | None:
        """Return what `rank` has published; None if it has not waited for long."""
        key = f"heads/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def close(self) -> None:
        """Close the connections; ranks and threads that wait for this rank get an error."""
        _close(self._gloo, [rank for rank in range(self.size) if rank != self.rank])


def _tag(key: str, tensor: Tensor) -> int:
    """Return the tag of gloo for `key`; operations of different sizes do not match."""
    size = tensor.numel() * tensor.element_size()
    return zlib.crc32(f"{key} {size}".encode()) & 0x7FFFFFFF


def _close(gloo: dist.ProcessGroupGloo, peers: Sequence[int]) -> None:
    """Let a receive from each peer time out: gloo then closes the connection."""
    for peer in peers:
        with suppress(RuntimeError):
            gloo.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class NcclLike(dist.ProcessGroup):
    """A process group with the order described above.

    Args:
        options: the options of the group, from torch.
        backend: one of BACKENDS.
    """

    def __init__(self, options: Any, _: Any = None, *, backend: str) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        ranks = options.global_ranks_in_group
        if not ranks:
            ranks = range(size)
            _World.current = _World(options.store, rank, size)
        self.world, self._ranks = _World.current, tuple(ranks)
        self._rank, self._size, self.backend = rank, size, backend
        self._store, self._name, self._description = options.store, options.group_id, ""
        self._timeout = options.timeout
        self._backend: _Backend | None = None
        self._collectives = Queue(self, f"{self._name}/collectives", self._ranks)
        self._pairs: dict[int, Queue] = {}
        self._connected: set[str] = set()
        self._communicator: dist.ProcessGroup | None = None
        self._gloo: dist.ProcessGroupGloo | None = None
        self.world.groups.append(self)

    def __str__(self) -> str:
        return f"nccl_like[{self._description}]"

    @property
    def queues(self) -> list[Queue]:
        return [self._collectives, *self._pairs.values()]

    # Point to point

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Operation:
        return self._single(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Operation:
        return self._single(False, tensors[0], peer)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Operation:
        raise RuntimeError("NCCL has no receive from any source")

    def _single(self, sends: bool, tensor: Tensor, peer: int) -> Operation:
        other = self._ranks[peer]
        pair = sorted((self.world.rank, other))
        queue = self._pairs.get(peer)
        if queue is None:
            queue = self._pairs[peer] = Queue(self, f"{self._name}/{pair[0]}:{pair[1]}", pair)
        if self.backend == LAZY:
            source, target = (self.world.rank, other) if sends else (other, self.world.rank)
            for name in (f"ranks {pair[0]}, {pair[1]}", f"sends from rank {source} to {target}"):
                meet = partial(self.world.meet, (other,), f"{self._name}/{name}")
                self._connect(name, queue, meet)
        way = "send" if sends else "receive"
        name = f"{way} {_describe(tensor)} {'to' if sends else 'from'} rank {other}"
        if sends:
            return queue.add(name, lambda: _finish([self.world.send(tensor, other, queue.key)]))
        arrived, deliver = _late(tensor)
        operation = queue.add(
            name, lambda: _finish([self.world.receive(arrived, other, queue.key)])
        )
        operation.deliver = deliver
        return operation

    def batch(self, operations: Sequence[dist.P2POp]) -> Operation:
        """Run sends and receives at once, as one entry of the queue of the collectives."""
        names = [
            f"{'send' if op.op is dist.isend else 'receive'} {_describe(op.tensor)} "
            f"{'to' if op.op is dist.isend else 'from'} rank {self._ranks[op.group_peer]}"
            for op in operations
        ]

        late = [_late(op.tensor) if op.op is dist.irecv else (op.tensor, None) for op in operations]

        def run() -> None:
            calls = {dist.isend: self.world.send, dist.irecv: self.world.receive}
            key = self._collectives.key
            _finish(
                [
                    calls[op.op](tensor, self._ranks[op.group_peer], key)
                    for op, (tensor, _) in zip(operations, late, strict=True)
                ]
            )

        operation = self._grouped(f"batch of {', '.join(names)}", run)
        operation.deliver = lambda: [deliver() for _, deliver in late if deliver is not None]
        return operation

    # Collectives

    def collective(self, name: str, *args: Any, **kwargs: Any) -> Operation:
        """Queue the collective `name`, a method of torch's ProcessGroup."""

        def run() -> None:
            _finish([getattr(self._communicator, name)(*args, **kwargs)])

        return self._grouped(name, run)

    def _grouped(self, name: str, run: Callable[[], None]) -> Operation:
        if self.backend == LAZY:
            self._connect("all ranks", self._collectives, self._join)

        def join_and_run() -> None:
            self._join()
            run()

        return self._collectives.add(name, join_and_run)

    def _connect(self, what: str, queue: Queue, connect: Callable[[], None]) -> None:
        """Block the host in `connect`, in the first call for `what`."""
        if what not in self._connected:
            self._connected.add(what)
            queue.add(f"connection of {what}", connect).wait()

    def _join(self) -> None:
        """Create the communicator of the group; blocks until all of its ranks join."""
        if self._communicator is not None:
            return
        others = [rank for rank in self._ranks if rank != self.world.rank]
        self.world.meet(others, f"{self._collectives.key}/join")
        # A connection of its own: a wait for a key blocks all other uses of a connection.
        store = dist.PrefixStore("communicator", self._store.clone())
        gloo = self._gloo = dist.ProcessGroupGloo(store, self._rank, self._size, _FOREVER)
        group = dist.ProcessGroup(store, self._rank, self._size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._communicator = group

    # What torch asks of a group

    @property
    def timeout(self) -> timedelta:
        return self._timeout if self._backend is None else self._backend.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        # torch 2.14 calls it; older versions change the timeout of the backend.
        self._get_backend(_CPU)._set_default_timeout(timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, _: torch.device) -> "_Backend":
        if self._backend is None:
            self._backend = _Backend(self)
        return self._backend

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return self.backend

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def abort(self) -> None:
        """Fail all pending operations of this rank, and close its connections."""
        self._end(close=True)

    def shutdown(self) -> None:
        """End the group; close its connections only if a thread still waits for a peer."""
        self._end(close=False)

    def _end(self, close: bool) -> None:
        for queue in self.queues:
            queue.abort()
        if self._gloo is not None and (close or self._collectives.is_running()):
            _close(self._gloo, [peer for peer in range(self._size) if peer != self._rank])
        # Ends its threads; torch and this module may refer to the group for longer.
        self._gloo = self._communicator = None
        waiting = any(queue.is_running() for group in self.world.groups for queue in group.queues)
        if self is self.world.groups[0] and (close or waiting):
            self.world.close()


class _Backend(dist.ProcessGroupGloo):
    """What torch takes for the backend of `group`: a gloo backend, whose timeout it can change."""

    def __init__(self, group: NcclLike) -> None:
        super().__init__(dist.HashStore(), 0, 1, group.timeout)
        self.timeout, self._abort = group.timeout, group.abort

    def _set_default_timeout(self, timeout: timedelta) -> None:
        # Not read from the options of gloo: newer versions of torch do not change them.
        self.timeout = timeout

    def abort(self) -> None:
        self._abort()


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _late(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Return memory for the data of a receive, and what copies them to `tensor`, NaN until then."""
    # The same version: the copy is no change in place for autograd.
    target = tensor.data
    arrived = torch.empty_like(target)
    # Bytes of 255 are NaN in every floating-point dtype.
    target.view(torch.uint8).fill_(255)
    return arrived, lambda: target.copy_(arrived)


def _finish(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait(_FOREVER)


def _collective(name: str) -> Callable[..., Operation]:
    def method(self: NcclLike, *args: Any, **kwargs: Any) -> Operation:
        return self.collective(name, *args, **kwargs)

    return method


for _name in _COLLECTIVES:
    setattr(NcclLike, _name, _collective(_name))

_torch_batch_isend_irecv = dist.batch_isend_irecv


def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """Replace torch's function: group the operations if the group is ours."""
    group = p2p_op_list[0].group or dist.group.WORLD
    if isinstance(group, NcclLike):
        return [group.batch(p2p_op_list)]
    return _torch_batch_isend_irecv(p2p_op_list)


def register() -> None:
    """Make the backends known to torch in this process."""
    if STRICT in dist.Backend.backend_list:
        return
    for name in BACKENDS:
        create = partial(NcclLike, backend=name)
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    dist.batch_isend_irecv = _batch_isend_irecv
