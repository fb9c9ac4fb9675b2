"""Rank arithmetic of the mesh: which rank has which index on each axis. Imports no torch.

world = pipeline x data x tensor, the last axis fastest:

    pipeline=2, data=1, tensor=2     rank 0  (0, 0, 0)     rank 2  (1, 0, 0)
                                     rank 1  (0, 0, 1)     rank 3  (1, 0, 1)

Agree on a name for this incarnation of a run, so that ranks never read stale store keys.

torchrun restarts all ranks when one has failed (--max-restarts), and usually keeps the store. The
restarted ranks would read keys of the earlier ones, such as addresses and failure reports. The
restart count does not identify an incarnation: with several nodes, each torchrun has its own count.
So rank 0 creates a name, and every rank checks that the name it has read belongs to the current
incarnation:

    rank 0                                  rank r
    write a new name
                                            read a name, write a random token under it
    answer the tokens of its children
                                            if the answer is this token: answer its own children;
                                            else read again

The ranks are a binomial tree: the parent of a rank is the rank without its lowest bit. So no rank
sends more messages than a multiple of the logarithm of the number of ranks.

Functions that `pipemega.run` calls when a script has ended without an error.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pipemega.errors import MeshError
from pipemega.printing import counted

AxisName = Literal["pipeline", "data", "tensor", "expert", "replica"]

# Tensor innermost: it communicates in every layer and must stay inside the node; the pipeline
# communicates once per micro-batch and can cross nodes.
AXES: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


class Coordinate(NamedTuple):
    """The index of one rank on each axis, from 0."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the three axes, and the mapping between ranks and coordinates.

    `expert` consecutive data ranks share the experts of a layer. They are the axis "expert"; the
    data ranks with the same experts are the axis "replica":

        data 4, expert 2     data rank         0    1    2    3
                             experts of 8     0-3  4-7  0-3  4-7
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def fit(
        cls,
        world_size: int,
        pipeline: int = 1,
        tensor: int = 1,
        data: int | Literal["auto"] = "auto",
        expert: int = 1,
    ) -> "Topology":
        """Return the topology of `world_size` ranks.

        Args:
            data: "auto" for world_size / (pipeline * tensor).

        Raises:
            MeshError: the product of the axes is not the world size, or the data ranks are not a
                multiple of the expert ranks.
        """
        per_copy = pipeline * tensor
        if data == "auto":
            if world_size % per_copy or world_size < per_copy:
                raise MeshError(
                    f"{started(world_size)}, and one copy of the model takes "
                    f"mesh.pipeline * mesh.tensor = {pipeline} * {tensor} = {per_copy}: start a "
                    f"multiple of {per_copy} ranks (torchrun --nproc_per_node), or change the mesh"
                )
            data = world_size // per_copy
        elif per_copy * data != world_size:
            raise MeshError(
                f"{started(world_size)}, and the mesh takes mesh.pipeline * mesh.data * "
                f"mesh.tensor = {pipeline} * {data} * {tensor} = {per_copy * data}: start "
                f"{per_copy * data} ranks (torchrun --nproc_per_node), or set mesh.data to 'auto'"
            )
        if data % expert:
            raise MeshError(
                f"{started(world_size)}, so there are {counted(data, 'data rank')} (mesh.data), "
                f"which is not a multiple of mesh.expert ({expert}): start a multiple of "
                f"{per_copy * expert} ranks, or set mesh.expert to a divisor of {data}"
            )
        return cls(pipeline, data, tensor, expert)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def replica(self) -> int:
        """Number of data ranks that have the same experts."""
        return self.data // self.expert

    def size(self, axis: AxisName) -> int:
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is not one of the {self.world_size} ranks of {self}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinate(pipeline, data, tensor)

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        return (pipeline * self.data + data) * self.tensor + tensor

    def along(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return, in order, `rank` and all ranks that differ from it on `axis` only."""
        here = self.coordinate(rank)._asdict()
        if axis in ("expert", "replica"):
            block, expert = divmod(here.pop("data"), self.expert)
            first, step = (block * self.expert, 1) if axis == "expert" else (expert, self.expert)
            places = range(first, first + step * self.size(axis), step)
            return tuple(self.rank(data=data, **here) for data in places)
        return tuple(self.rank(**{**here, axis: i}) for i in range(self.size(axis)))

    def __str__(self) -> str:
        axes = f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"
        return axes if self.expert == 1 else f"{axes}, expert {self.expert}"

    @classmethod
    def from_text(cls, text: str) -> "Topology":
        """Return the topology whose `str` is `text`."""
        # Without the part "expert", as runs before mesh.expert wrote it.
        axes, _, expert = text.partition(", expert ")
        sizes = dict(part.split(" ") for part in axes.split(" x "))
        return cls(**{axis: int(sizes[axis]) for axis in AXES}, expert=int(expert or 1))


def started(world_size: int) -> str:
    """Return "1 rank was started", or "4 ranks were started"."""
    return "1 rank was started" if world_size == 1 else f"{world_size} ranks were started"


_NAME = "pipemega/incarnation"

# Seconds between two polls; growing, so that thousands of ranks do not overload the store.
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.5


def agree_on_incarnation(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Return a name that all ranks of this incarnation share and no other has; collective.

    Args:
        store: a torch.distributed.Store.
        seconds: how long ranks wait for their parents; these wait for the store's own timeout.

    Raises:
        MeshError: the parent did not answer in time.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(_NAME, name)
    else:
        name = _confirmed_name(store, rank, seconds)
    for child in _children(rank, world_size):
        store.set(f"{_NAME}/{name}/answer/{child}", store.get(f"{_NAME}/{name}/{child}"))
    return name


def _children(rank: int, world_size: int) -> list[int]:
    """Return the ranks whose parent this is, the largest subtree first."""
    # The number of trailing zeros; rank 0 has all powers of 2.
    bits = (rank & -rank).bit_length() - 1 if rank else (world_size - 1).bit_length()
    children = [rank + (1 << bit) for bit in reversed(range(bits))]
    return [child for child in children if child < world_size]


def _confirmed_name(store: Any, rank: int, seconds: float) -> str:
    token, deadline, pause = uuid.uuid4().hex, time.monotonic() + seconds, _FIRST_POLL_SECONDS
    while time.monotonic() < deadline:
        if store.check([_NAME]):
            name = store.get(_NAME).decode()
            answer = f"{_NAME}/{name}/answer/{rank}"
            store.set(f"{_NAME}/{name}/{rank}", token)
            if store.check([answer]) and store.get(answer).decode() == token:
                return str(name)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    parent = rank & (rank - 1)
    raise MeshError(
        f"rank {rank}: no answer from rank {parent} within {seconds:g} s (mesh.timeout_seconds); "
        f"check that rank {parent} was started and reaches the same store"
    )


_Hooks = list[Callable[[], None]]

# None outside of `collect_exit_hooks`, as in a script without `pipemega.run`.
_hooks: ContextVar[_Hooks | None] = ContextVar("exit hooks", default=None)


@contextmanager
def collect_exit_hooks() -> Iterator[_Hooks]:
    """Yield the list to which `register_exit_hook` adds within the block."""
    hooks: _Hooks = []
    token = _hooks.set(hooks)
    try:
        yield hooks
    finally:
        _hooks.reset(token)


def exit_hooks_enabled() -> bool:
    """Return whether `pipemega.run` will call the hooks."""
    return _hooks.get() is not None


def register_exit_hook(hook: Callable[[], None]) -> None:
    """Make `pipemega.run` call `hook`, after the hooks registered before; else do nothing.

    All ranks must register the same hooks in the same order: they may be collective.
    """
    hooks = _hooks.get()
    if hooks is not None:
        hooks.append(hook)
