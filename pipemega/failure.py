"""One rank fails, all ranks end, and every one of them says why.

A rank that fails writes its cause where all can read it (the store that the ranks met through),
then breaks its connections. Whoever waits for it is woken by that, breaks its own, and reads the
cause: the news runs along whatever anybody waits for. A rank that was killed, or that hangs, writes
nothing: those that lost it sign in, and who has not done so after a while is the missing one.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipemega.errors import PeerError, PipemegaError
from pipemega.mesh import Axis
from pipemega.pipeline.standstill import Place, describe

_CAUSE = "pipemega/failure/cause"
_LOST = "pipemega/failure/lost"
_ENDED = "pipemega/failure/ended"

# What the backends write when the other side has left, or did not answer in time.
_SIGNS_OF_LOSS = (
    "gloo/transport", "connection closed", "connection reset", "pair closure", "timed out",
    "broken pipe", "connection refused", "remote process exited", "nccl",
)  # fmt: skip

# How long ranks that lost a connection wait for each other, and for the cause.
_PATIENCE = 3.0
_GLANCE = 0.02

# No message of ours has this tag.
_UNUSED_TAG = 0x7FFF


class Stopped(BaseException):
    """SIGTERM came: of torchrun, when another rank has ended, or of whoever started the job."""


@dataclass(frozen=True)
class _Report:
    """What a rank has to say; `rank` is None where it speaks for one that cannot.

    `at` is where it stood in its pipeline's plan, if it was at that.
    """

    rank: int | None
    message: str
    at: int | None = None


class FailureBoard:
    """Where the first cause is written and read.

    Args:
        world: all ranks; alone, a rank has nobody to tell.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._store: Any = None
        if world.size > 1:
            self._store = dist.distributed_c10d._get_default_store()

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """Lets an error within end the other ranks too, and theirs end this one.

        Args:
            doing: says in messages what this rank was at.
        """
        try:
            yield
        except StopIteration:
            # The end of the data, which all ranks have agreed on.
            raise
        except BaseException as error:
            explained = self.explain(error, doing)
            if explained is error:
                raise
            raise explained from error

    def explain(self, error: BaseException, doing: str) -> BaseException:
        """What this rank should raise for `error`: itself, or another rank's cause behind it.

        Tells the other ranks, and breaks the connections that they may be waiting on; unless all
        ranks raise the same at the same point, and none is waiting.
        """
        if self._store is None or isinstance(error, PeerError):
            return error
        message, lost = _message(error, doing), is_loss(error)
        if isinstance(error, PipemegaError) and error.on_every_rank and not lost:
            return error
        if lost:
            cause = self._ask_around(message, _place_of(error))
        else:
            cause = self._write(_Report(self._world.rank, message))
            _break_connections()
        if cause.rank == self._world.rank or cause.message == message:
            return error
        name = "" if cause.rank is None else f"rank {cause.rank} failed first: "
        here = f"\n  (rank {self._world.rank} was stopped by that in {_brief(message)})"
        told = _brief(message) in cause.message
        return PeerError(f"{name}{cause.message}{'' if told else here}")

    def is_told(self) -> bool:
        """Whether a rank has failed, as far as anybody has written so."""
        if self._store is None:
            return False
        with suppress(RuntimeError):
            return bool(self._store.check([_CAUSE])) or bool(self._store.add(_LOST, 0))
        return True  # the store is gone, and with it the rank or the agent that held it

    def wait_for_last_words(self, seconds: float) -> None:
        """Returns when all ranks have come here, or are late.

        The first process that ends takes others with it: the one that holds the store by what
        they cannot read any more, any of them by torchrun, which then stops the rest.
        """
        if self._store is None:
            return
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            self._store.add(_ENDED, 1)
            while self._store.add(_ENDED, 0) < self._world.size and time.monotonic() < deadline:
                time.sleep(_GLANCE)

    def _ask_around(self, message: str, place: Place | None) -> _Report:
        """The cause behind a lost connection: what a rank has written, or who does not answer."""
        mine = _Report(self._world.rank, message, None if place is None else place.at)
        try:
            number = self._store.add(_LOST, 1)
            self._store.set(f"{_LOST}/{number}", json.dumps(asdict(mine)))
        except RuntimeError:
            return _Report(
                None,
                f"{_brief(message)}; and the store of the ranks, which is in rank 0 unless "
                f"torchrun has it, is gone",
            )
        finally:
            # At once: the sooner all are woken, the surer it is who is missing.
            _break_connections()
        deadline = time.monotonic() + _PATIENCE
        signed: list[_Report] = []
        while time.monotonic() < deadline and len(_ranks(signed)) < self._world.size:
            time.sleep(_GLANCE)
            if (cause := self._read(_CAUSE)) is not None:
                return cause
            signed = self._signed_in()
        return self._write(self._verdict(signed or [mine], place))

    def _signed_in(self) -> list[_Report]:
        """Who has lost a connection so far, the first one first."""
        with suppress(RuntimeError):
            count = self._store.add(_LOST, 0)
            reports = [self._read(f"{_LOST}/{number}") for number in range(1, count + 1)]
            return [report for report in reports if report is not None]
        return []

    def _verdict(self, signed: list[_Report], place: Place | None) -> _Report:
        missing = sorted(set(self._world.ranks) - _ranks(signed))
        first = signed[0]
        text, *table = first.message.splitlines()
        if place is not None:
            table = [
                describe(
                    place,
                    {r.rank: r.at for r in signed if r.rank is not None and r.at is not None},
                    missing,
                )
            ]
        if not missing:
            return replace(first, message="\n".join([_brief(text), *table]))
        return _Report(
            None,
            "\n".join(
                [
                    f"no sign of life from rank {', '.join(map(str, missing))}: killed, crashed, "
                    f"hanging, or slower than mesh.timeout_seconds; missed first by rank "
                    f"{first.rank} in {_brief(text)}",
                    *table,
                ]
            ),
        )

    def _read(self, key: str) -> _Report | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return _Report(**json.loads(self._store.get(key)))
        return None

    def _write(self, report: _Report) -> _Report:
        """Makes it the cause unless there is one; returns the one that stands."""
        with suppress(RuntimeError):
            standing = self._store.compare_set(_CAUSE, "", json.dumps(asdict(report)))
            return _Report(**json.loads(standing))
        return report


def _place_of(error: BaseException) -> Place | None:
    """Where this rank stood in its plan; of SIGTERM, what it came into."""
    within = error.__context__ if isinstance(error, Stopped) else error
    place = getattr(within, "place", None)
    return place if isinstance(place, Place) else None


def _ranks(reports: list[_Report]) -> set[int | None]:
    return {report.rank for report in reports}


def _break_connections() -> None:
    """Breaks every connection of this rank, of every group, so that nobody waits for it."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == "gloo":
            _break_gloo(group)
        else:
            with suppress(RuntimeError):
                group._get_backend(torch.device("cuda")).abort()


def _break_gloo(group: dist.ProcessGroup) -> None:
    """Gloo closes all connections of a group when one wait in it runs out of time; so let one."""
    for rank in dist.get_process_group_ranks(group):
        # On a connection that is broken already there is nothing to wait for: on to the next.
        if rank != dist.get_rank():
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), rank, group=group, tag=_UNUSED_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def is_loss(error: BaseException) -> bool:
    """Whether the error, at its root, is a broken or silent connection."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, Stopped):
        return True
    # Of torch itself: a layer of the user's may well speak of sockets.
    ours = type(root) is RuntimeError or isinstance(root, dist.DistError)
    return ours and any(sign in str(root).lower() for sign in _SIGNS_OF_LOSS)


def _message(error: BaseException, doing: str) -> str:
    if isinstance(error, PipemegaError):
        return str(error)
    if isinstance(error, Stopped):
        # What it came into, which may be the loss of the rank that SIGTERM is about.
        within = error.__context__
        return "SIGTERM" + ("" if within is None else f", {_message(within, doing)}")
    return f"{doing}: {type(error).__name__}: {error}".removesuffix(": ")


def _brief(text: str) -> str:
    """The first line, without what gloo adds: its source file, and good advice."""
    line = text.splitlines()[0]
    return re.sub(r"\[/\S+:\d+\] |\. This is typically caused by a remote worker.*", "", line)
