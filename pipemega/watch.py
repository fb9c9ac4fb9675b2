"""A thread that says where its rank stands, when others miss it.

A rank that hangs in a call of its own (a sample that never comes, a loop without an end) waits for
nobody, so that no deadline of a wait runs out on it, and nothing can be raised in it. The others
miss it, and write that to the store; this thread, which looks there, answers for its rank: the
instruction, and the lines of Python that the rank and its data threads are in. If the rank is still
there when all others have ended, the thread ends it, whether something has started it that would,
as torchrun does, or not.
"""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist

from pipemega.failure import FailureBoard
from pipemega.mesh import launched_rank, launched_world_size, world_axis

# How often it looks; with many ranks less often, so that the store has less than this many looks
# per second to answer. It must be well below the time that ranks wait for each other's news.
_LOOK_SECONDS = 0.5
_LOOKS_PER_SECOND = 4000.0

# How long a rank that others miss may take to find out why, before it is ended as it stands.
_GRACE = 9.0

# Lines that are shown of a stack.
_LINES = 6

_DATA_THREADS = ("data-prefetch", "data-worker")
_EXECUTOR = "pipemega.pipeline.executor"


@contextmanager
def watching() -> Iterator[None]:
    """Watches over the thread that calls it, as long as the block runs.

    Also lets a crash in C show the line of Python that led to it.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        with suppress(ValueError, OSError):
            faulthandler.enable(sys.__stderr__)
    watch = _Watch(threading.get_ident())
    try:
        yield
    finally:
        watch.close()


class _Watch:
    def __init__(self, watched: int) -> None:
        self._watched = watched
        self._over = threading.Event()
        self._pause = _LOOK_SECONDS
        self._board: FailureBoard | None = None
        self._thread = threading.Thread(target=self._look_out, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * _LOOK_SECONDS)

    def _look_out(self) -> None:
        try:
            while not self._over.wait(self._pause):
                if self._board is None:
                    self._join_the_board()
                # From here on it may wait itself, for a store that does not answer.
                faulthandler.cancel_dump_traceback_later()
                if self._board is not None and self._board.alarmed:
                    self._answer(self._board)
                    return
                _expect_to_be_back()
        except RuntimeError:
            # The store is gone, and with it whoever could be told.
            self._end_if_it_stays("the store of the ranks is gone")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _join_the_board(self) -> None:
        """As soon as the ranks have met; the rank itself may be waiting in its own connection."""
        # They may part again at the same moment; a store that does not answer is asked again.
        with suppress(ValueError, RuntimeError):
            if launched_world_size() > 1 and dist.is_initialized():
                self._board = FailureBoard(world_axis(), own_connection=True)
                self._pause = max(_LOOK_SECONDS, launched_world_size() / _LOOKS_PER_SECOND)

    def _answer(self, board: FailureBoard) -> None:
        here = standing(self._watched)
        board.say_where(here)
        if not self._over.wait(_GRACE) and not board.has_spoken:
            cause = board.cause
            told = here in cause
            self._end(cause if told else f"{cause}\n  (rank {launched_rank()} stood {here})")

    def _end_if_it_stays(self, why: str) -> None:
        if self._board is not None and not self._over.wait(_GRACE):
            self._end(f"{why}\n  (rank {launched_rank()} stood {standing(self._watched)})")

    def _end(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"error: rank {launched_rank()}: {text}\n")
            sys.stderr.flush()
        os._exit(1)


def _expect_to_be_back() -> None:
    """Has every stack shown if this thread cannot run for as long as ranks wait for each other.

    That is so while a call keeps Python's lock, which no thread of Python can tell of.
    """
    group = dist.group.WORLD
    if group is None or dist.get_backend(group) != "gloo" or sys.__stderr__ is None:
        return
    with suppress(RuntimeError, ValueError, OSError):
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        timeout = max(timeout, 10 * _LOOK_SECONDS)
        faulthandler.dump_traceback_later(timeout, file=sys.__stderr__)


def standing(thread: int) -> str:
    """Where a thread is, and the threads that read its data: an instruction, and lines of Python.

    in F2@1, in read_block
        reader.py, line 12 in read_block: time.sleep(3600)
        ...
    """
    frames = sys._current_frames()
    if thread not in frames:
        return "nowhere: its thread has ended"
    step = _instruction(frames[thread])
    lines = _lines(frames[thread])
    for other in threading.enumerate():
        if other.name.startswith(_DATA_THREADS) and other.ident in frames:
            lines += [f"thread {other.name}:", *_lines(frames[other.ident])]
    within = frames[thread].f_code.co_name
    first = f"in {within}" if step is None else f"at {step}, in {within}"
    return "\n".join([first, *(f"      {line}" for line in lines)])


def _lines(frame: FrameType) -> list[str]:
    stack = traceback.extract_stack(frame)[-_LINES:]
    return [
        f"{os.path.basename(line.filename)}, line {line.lineno} in {line.name}: {line.line}"
        for line in reversed(stack)
    ]


def _instruction(frame: FrameType | None) -> str | None:
    """The instruction of the plan that the executor, somewhere below, is at."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _EXECUTOR and "step" in frame.f_locals:
            return str(frame.f_locals["step"])
        frame = frame.f_back
    return None
