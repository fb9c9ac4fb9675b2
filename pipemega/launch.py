"""How a training script ends: in order when all went well, with one message when it did not."""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from pipemega.endings import collecting
from pipemega.errors import PeerError, PipemegaError
from pipemega.failure import FailureBoard, Stopped, is_loss
from pipemega.mesh import launched_rank, launched_world_size, world_axis
from pipemega.stopping import is_heeded
from pipemega.watch import watching

# torchrun stops all ranks as soon as one has ended; this long they get to say why they do.
_LAST_WORDS = 2.0

# How long a rank that was stopped may take to find out why, before it is ended as it stands.
_GRACE = 6.0

# How often a rank that was stopped, and finishes its step, looks if another one has failed.
_GLANCE = 0.5

_INTERRUPTED = 130


@contextmanager
def run() -> Iterator[None]:
    """Wraps the body of a script that torchrun starts.

        with pipemega.run():
            engine, *_ = pipemega.initialize(...)
            ...

    An error on any rank, wherever it was raised, ends all of them with exit code 1, and each says
    why in one message; the rank that failed shows the trace of the user's own code before it. A
    rank that others wait for in vain says where it stands, and is ended. At the end process groups
    are shut down in order: torn down by the interpreter's exit they may abort a run that had
    succeeded.
    """
    with _heeding_sigterm(), watching(), collecting() as actions:
        code: str | int | None = None
        try:
            try:
                yield
            except SystemExit as wish:
                if wish.code not in (None, 0):
                    raise
            for action in actions:
                action()
            if dist.is_initialized():
                dist.barrier()
        except BaseException as error:
            code = _end(error)
        if code is not None:
            sys.exit(code)
        if dist.is_initialized():
            dist.destroy_process_group()


def _end(error: BaseException) -> str | int:
    """Tells why the run ends; returns the exit code."""
    if threading.current_thread() is threading.main_thread():
        # That of torchrun, when another rank was quicker, must not cut the words short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    board = FailureBoard(world_axis())
    explained = board.explain(error, "the script")
    sys.stdout.flush()
    if explained is not error or not isinstance(error, SystemExit):
        # In one write: the ranks share the terminal, and print() would write the newline apart.
        sys.stderr.write(f"{_trace_of(explained)}{_told(explained)}\n")
        sys.stderr.flush()
        _leave_for_torchrun(_told(explained))
    if dist.is_initialized():
        board.wait_for_last_words(_LAST_WORDS)
    elif launched_world_size() > 1:
        # The ranks have not met, and do not start at the same moment.
        time.sleep(_LAST_WORDS)
    if isinstance(error, SystemExit) and error.code is not None:
        return error.code
    return _INTERRUPTED if isinstance(explained, KeyboardInterrupt) else 1


def _told(error: BaseException) -> str:
    rank = f"rank {launched_rank()}: " if launched_world_size() > 1 else ""
    if isinstance(error, PipemegaError | Stopped):
        return f"error: {rank}{error}"
    return f"error: {rank}{type(error).__name__}: {error}".removesuffix(": ")


def _trace_of(error: BaseException) -> str:
    origin = _origin(error)
    return "" if origin is None else "".join(traceback.format_exception(origin))


def _leave_for_torchrun(text: str) -> None:
    """Lets torchrun end what it says, which comes last on the terminal, with `text`.

    It shows what its ranks leave in a file each, as torch's own `@record` does.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = str(int(time.time()))
    left = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": now}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": left}), encoding="utf-8")


def _origin(error: BaseException) -> BaseException | None:
    """The error of foreign code, a layer's for one, whose trace shows the way to the mistake."""
    if isinstance(error, PeerError | KeyboardInterrupt) or is_loss(error):
        return None
    if not isinstance(error, PipemegaError):
        return error
    cause = error.__cause__
    # What the system says of a file is in our message already.
    return None if cause is None or isinstance(cause, OSError) else _origin(cause)


@contextmanager
def _heeding_sigterm() -> Iterator[None]:
    """Makes an exception of SIGTERM, so that the rank can find out why and say so.

    Python raises it between two of its own instructions. A rank that waits inside torch for
    something that never comes gets there no more: a thread gives it time, and then ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # Once: what follows is the end already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped("stopped by SIGTERM")

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.signal(signal.SIGTERM, stop)
    woken_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_end_the_deaf, args=(ours, over), daemon=True, name="sigterm").start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(woken_before)
        signal.signal(signal.SIGTERM, before)
        theirs.close()


def _end_the_deaf(signals: socket.socket, over: threading.Event) -> None:
    """Ends the process a while after a SIGTERM that it did not end by itself.

    Args:
        signals: brings the numbers of those that come.
        over: the script has come to its end.
    """
    with signals:
        while (number := signals.recv(1)) != bytes([signal.SIGTERM]):
            if not number:
                return
    # Who finishes the step and saves it may take longer, unless a rank has failed; which the rank's
    # own connection to the store cannot tell while the rank waits in it.
    board: FailureBoard | None = None
    try:
        while is_heeded():
            board = board or FailureBoard(world_axis(), own_connection=True)
            if board.is_told():
                break
            if over.wait(_GLANCE):
                return
    except RuntimeError:
        # The store is gone, and a rank with it.
        board = None
    time.sleep(_GRACE)
    sys.stderr.write(
        f"error: rank {launched_rank()}: stopped by SIGTERM, deep in a call that did not return\n"
    )
    sys.stderr.flush()
    os._exit(1)
