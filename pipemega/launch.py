"""How a training script ends: in order when all went well, with one message when it did not."""

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pipemega.errors import PeerError, PipemegaError

# torchrun stops all ranks as soon as one has ended; this long they get to say why they do.
_LAST_WORDS = 1.5


@contextmanager
def run() -> Iterator[None]:
    """Wraps the body of a script that torchrun starts.

        with pipemega.run():
            engine, *_ = pipemega.initialize(...)
            ...

    A `PipemegaError` ends the process with exit code 1 and one message, with the trace of the
    user's own code if that is where it came from. At the end process groups are shut down in
    order: torn down by the interpreter's exit they may abort a run that had succeeded.
    """
    try:
        yield
    except PipemegaError as error:
        sys.stdout.flush()
        print(_message(error), file=sys.stderr, flush=True)
        if dist.is_initialized() and dist.get_world_size() > 1 and not isinstance(error, PeerError):
            time.sleep(_LAST_WORDS)
        sys.exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _message(error: PipemegaError) -> str:
    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    origin = _origin(error)
    trace = "".join(traceback.format_exception(origin)) if origin is not None else ""
    return f"{trace}error: {rank}{error}"


def _origin(error: BaseException) -> BaseException | None:
    """The error of foreign code, a layer's for one, that ours came from."""
    if isinstance(error, PeerError):
        return None
    while isinstance(error, PipemegaError):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return None if isinstance(error, OSError) else error
