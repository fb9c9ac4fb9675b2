"""One rank fails, all ranks end, and every one of them says why.

A rank that fails writes its cause where all can read it (the store that the ranks met through),
then breaks its connections. Whoever waits for it is woken by that, breaks its own, and reads the
cause: the news runs along whatever anybody waits for. A rank that was killed, or that hangs, writes
nothing: those that lost it sign in, and who has not done so after a while is the missing one. Of
one that hangs a thread of its own (`watch.py`) says where it stands.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipemega.errors import PeerError, PipemegaError
from pipemega.meetings import brief, described
from pipemega.mesh import Axis
from pipemega.pipeline.standstill import Place, describe

T = TypeVar("T")

_CAUSE = "pipemega/failure/cause"
_LOST = "pipemega/failure/lost"
_ENDED = "pipemega/failure/ended"
_STANDS = "pipemega/failure/stands"
_SPOKE = "pipemega/failure/spoke"

# What the backends write when the other side has left, or did not answer in time.
_SIGNS_OF_LOSS = (
    "gloo/transport", "connection closed", "connection reset", "pair closure", "timed out",
    "broken pipe", "connection refused", "remote process exited", "nccl",
)  # fmt: skip

# How long ranks that lost a connection wait for each other, and for the cause.
_PATIENCE = 3.0

# torch's own DataLoader has deadlines too; what runs out there is no connection.
_NO_CONNECTIONS = "torch.utils.data"

_GLANCE = 0.02

# More than that nobody waits for the store itself.
_LAST_LOOK = 0.5

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
        own_connection: to the store; for another thread than the one that waits in it.
    """

    def __init__(self, world: Axis, own_connection: bool = False) -> None:
        self._world = world
        self._store: Any = None
        if world.size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if own_connection else store

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
        cause = self._share(message, _place_of(error), lost)
        if cause.rank == self._world.rank or cause.message == message:
            # A backend's own words say neither what was waited for nor with whom.
            bare = lost and not isinstance(error, PipemegaError | Stopped)
            return PeerError(cause.message) if bare else error
        name = "" if cause.rank is None else f"rank {cause.rank} failed first: "
        here = f"\n  (rank {self._world.rank} was stopped by that in {brief(message)})"
        told = brief(message) in cause.message
        return PeerError(f"{name}{cause.message}{'' if told else here}")

    def is_told(self) -> bool:
        """Whether a rank has failed, as far as anybody has written so."""
        if self._store is None:
            return False
        with suppress(RuntimeError):
            return self.alarmed
        return True  # the store is gone, and with it the rank or the agent that held it

    def _share(self, message: str, place: Place | None, lost: bool) -> _Report:
        """Tells what happened here, and lets go of all connections; the cause that stands."""
        mine = _Report(self._world.rank, message, None if place is None else place.at)
        ask, alone, told = partial(self._write, mine), mine, threading.Event()
        if lost:
            ask = partial(self._ask_around, mine, place)
            alone = _Report(None, f"{brief(message)}; and the store of the ranks does not answer")

        def speak() -> _Report:
            with suppress(RuntimeError):
                self._store.set(f"{_SPOKE}/{self._world.rank}", "")
            return ask(told)

        with _within(_PATIENCE + _LAST_LOOK, speak) as answer:
            told.wait(_LAST_LOOK)
            # At once: the sooner all are woken, the surer it is who is missing.
            _break_connections()
        return answer[0] if answer else alone

    def wait_for_last_words(self, seconds: float) -> None:
        """Returns when all ranks have come here, or are late.

        The first process that ends takes others with it: the one that holds the store by what
        they cannot read any more, any of them by torchrun, which then stops the rest.
        """
        if self._store is None:
            return
        deadline = time.monotonic() + seconds

        def wait() -> None:
            with suppress(RuntimeError):
                self._store.add(_ENDED, 1)
                while self._store.add(_ENDED, 0) < self._world.size and time.monotonic() < deadline:
                    time.sleep(_GLANCE)

        with _within(seconds, wait):
            pass

    @property
    def alarmed(self) -> bool:
        """Whether a rank has failed, or misses another one.

        Raises:
            RuntimeError: the store is gone.
        """
        return any(self._store.check([key]) for key in (_CAUSE, f"{_LOST}/1"))

    @property
    def has_spoken(self) -> bool:
        """Whether this rank has told its own failure, or that it misses another rank."""
        return bool(self._store.check([f"{_SPOKE}/{self._world.rank}"]))

    @property
    def cause(self) -> str:
        """What is known of it; of a rank that failed itself, with its number."""
        cause = self._read(_CAUSE)
        if cause is None:
            return "another rank misses this one"
        return cause.message if cause.rank is None else f"rank {cause.rank}: {cause.message}"

    def say_where(self, here: str) -> None:
        """Lets those that miss this rank read where it stands."""
        with suppress(RuntimeError):
            self._store.set(f"{_STANDS}/{self._world.rank}", here)

    def _where(self, rank: int) -> str | None:
        with suppress(RuntimeError):
            if self._store.check([f"{_STANDS}/{rank}"]):
                return str(self._store.get(f"{_STANDS}/{rank}").decode())
        return None

    def _ask_around(self, mine: _Report, place: Place | None, told: threading.Event) -> _Report:
        """The cause behind a lost connection: what a rank has written, or who does not answer."""
        try:
            number = self._store.add(_LOST, 1)
            self._store.set(f"{_LOST}/{number}", json.dumps(asdict(mine)))
        except RuntimeError:
            return _Report(
                None,
                f"{brief(mine.message)}; and the store of the ranks, which is in rank 0 unless "
                f"torchrun has it, is gone",
            )
        finally:
            told.set()
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
        """Who is missing, and where; if nobody is, what each waited for."""
        missing = sorted(set(self._world.ranks) - _ranks(signed))
        first = signed[0]
        text, *table = first.message.splitlines()
        if place is not None:
            at = {r.rank: r.at for r in signed if r.rank is not None and r.at is not None}
            table = [describe(place, at, missing)]
        if not missing:
            elsewhere = [r for r in signed if brief(r.message) != brief(text) and r.at is None]
            others = [f"  rank {r.rank}: {brief(r.message)}" for r in elsewhere]
            return replace(first, message="\n".join([brief(text), *others, *table]))
        where = {rank: here for rank in missing if (here := self._where(rank)) is not None}
        gone = [rank for rank in missing if rank not in where]
        causes = []
        if gone:
            causes.append(
                f"no sign of life from rank {_listed(gone)}: killed, crashed, hanging, or slower "
                f"than mesh.timeout_seconds"
            )
        if where:
            causes.append(
                f"rank {_listed(where)} did not come within mesh.timeout_seconds, and is alive"
            )
        stands = [f"  rank {rank} stands {here}" for rank, here in where.items()]
        missed = f"missed first by rank {first.rank} in {brief(text)}"
        return _Report(None, "\n".join(["; ".join([*causes, missed]), *stands, *table]))

    def _read(self, key: str) -> _Report | None:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return _Report(**json.loads(self._store.get(key)))
        return None

    def _write(self, report: _Report, told: threading.Event | None = None) -> _Report:
        """Makes it the cause unless there is one; returns the one that stands."""
        try:
            standing = self._store.compare_set(_CAUSE, "", json.dumps(asdict(report)))
            return _Report(**json.loads(standing))
        except RuntimeError:
            return report
        finally:
            if told is not None:
                told.set()


@contextmanager
def _within(seconds: float, ask: Callable[[], T]) -> Iterator[list[T]]:
    """Runs `ask` beside the block; afterwards its answer is in the list, unless it took too long.

    A store behind a link that was cut lets those who ask it wait for ever.
    """
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(ask()), name="asking", daemon=True)
    thread.start()
    yield answer
    thread.join(seconds)


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
    root = _root(error)
    if isinstance(root, Stopped):
        return True
    # Of torch itself: a layer of the user's may well speak of sockets.
    ours = type(root) is RuntimeError or isinstance(root, dist.DistError)
    if not ours or _raised_in(root).startswith(_NO_CONNECTIONS):
        return False
    return any(sign in str(root).lower() for sign in _SIGNS_OF_LOSS)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _raised_in(error: BaseException) -> str:
    """The module of the innermost line of Python."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def _message(error: BaseException, doing: str) -> str:
    if isinstance(error, PipemegaError):
        return str(error)
    if isinstance(error, Stopped):
        # What it came into, which may be the loss of the rank that SIGTERM is about.
        within = error.__context__
        return "SIGTERM" + ("" if within is None else f", {_message(within, doing)}")
    if is_loss(error):
        return f"{doing}: {described(error)}"
    return f"{doing}: {type(error).__name__}: {error}".removesuffix(": ")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
