"""Describe the errors of collectives: operation, tensor, ranks and caller.

Backends report "connection closed" or "timed out" and nothing else. The traceback holds the rest:
torch's function, its tensor and its group, and our function that called it. So every collective is
named, also one in the user's script, and no call has to pass a name. Only a wait for a collective
that was started earlier has no such traceback: use `named_collective` there.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import PipelineError, Stopped

_TORCH = "torch.distributed.distributed_c10d"
_OURS = "pipemega."
# Modules that are on the stack of every error, or that call a collective for another module; the
# caller to report is another one.
_NOT_CALLERS = (
    "pipemega.distributed.comm_errors",
    "pipemega.distributed.exchanges",
    "pipemega.distributed.mesh",
    "pipemega.fault_tolerance.error_propagation",
    "pipemega.fault_tolerance.run",
    "pipemega.profiling.communication",
)
# torch's names of the group of all ranks.
_DEFAULT_GROUP = ("", "undefined", "default_pg")

# In the messages of backends when a peer is gone or did not respond in time.
_CONNECTION_LOSS = (
    "gloo/transport", "connection closed", "connection reset", "pair closure", "timed out",
    "broken pipe", "connection refused", "remote process exited", "nccl", "wait timeout",
)  # fmt: skip

# In our messages when a peer did not respond in time.
TIMED_OUT = "timed out after mesh.timeout_seconds"

# The timeouts of torch's DataLoader are not lost connections.
_NO_CONNECTIONS = "torch.utils.data"


@contextmanager
def named_collective(what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Name the collective in errors of a wait for it.

    Args:
        what: the collective, such as "the all-reduce of a tensor-parallel layer".
        ranks: the global ranks of its group; empty if `what` contains them.

    Raises:
        PipelineError: the backend failed; names the collective and the ranks.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PipelineError) and error.place is not None:
            # An earlier wait of the device, which has its name.
            raise
        raise comm_error(with_ranks(what, ranks), error) from error


def with_ranks(what: str, ranks: Sequence[int]) -> str:
    """Return the name of a collective with its ranks."""
    return f"{what} over ranks {_listed(ranks)}" if ranks else what


def comm_error(what: str, error: RuntimeError) -> PipelineError:
    """Return the error to raise if communication `what` failed with the backend's `error`."""
    return PipelineError(f"{what}: {trim_backend_error(str(error))}")


class CollectiveError(dist.DistError):
    """A collective on a device failed; the message names it."""


def collective_error(call: str, tensor: Tensor, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return what makes the error of a collective of the calling module from its cause.

    The error reads as if torch had raised it in the call: see `describe_comm_error`.

    Args:
        call: the function of torch.distributed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) in _NOT_CALLERS:
        frame = frame.f_back
    # Strings: a frame would keep its tensors alive.
    caller = "" if frame is None or not _module(frame).startswith(_OURS) else _function(frame)
    elements, dtype = tensor.numel(), tensor.dtype
    where = f" in {caller}" if caller else ""

    def error(cause: RuntimeError) -> CollectiveError:
        text = f"{call}{_elements(elements, dtype)} over {_describe_group(group)}{where}"
        return CollectiveError(f"{text}: {trim_backend_error(str(cause))}")

    return error


def is_connection_loss(error: BaseException) -> bool:
    """Return whether the root cause of `error` is a broken connection or a timeout."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, Stopped):
        return True
    # Errors of torch only: the errors of a user's layer may mention sockets, too.
    from_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not from_torch or _raising_module(error).startswith(_NO_CONNECTIONS):
        return False
    return any(part in str(error).lower() for part in _CONNECTION_LOSS)


def _raising_module(error: BaseException) -> str:
    """Return the module of the innermost Python frame."""
    modules = [_module(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1] if modules else ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def describe_comm_error(error: BaseException) -> str:
    """Return the error's text, with the collective that failed if the traceback shows one.

    all_reduce of 1,024 float32 over data ranks 0, 2 in optimizer.gradients.reduce_data: timed out
    """
    if isinstance(error, CollectiveError):
        return str(error)
    caller, call = _frames(error)
    text = trim_backend_error(str(error))
    if call is None:
        return f"{type(error).__name__ if caller is None else _function(caller)}: {text}"
    where = "" if caller is None else f" in {_function(caller)}"
    return f"{call.f_code.co_name}{_size(call)} over {_group(call)}{where}: {text}"


def trim_backend_error(text: str) -> str:
    """Return the first line, without gloo's source file and advice."""
    line = (text.splitlines() or [""])[0]
    line = re.sub(r"\[/\S+:\d+\] |\. This is typically caused by a remote worker.*", "", line)
    # The second: a store waits for another rank, which does not create the process group.
    return re.sub(
        r"[Tt]imed out waiting (\d+)ms for \w+ operation to complete"
        r"|[Ww]ait timeout(?: after (\d+)ms, keys: .*)?",
        _timed_out,
        line,
    )


def _timed_out(match: re.Match[str]) -> str:
    milliseconds = match[1] or match[2]
    return TIMED_OUT + (f" ({int(milliseconds) / 1000:g} s)" if milliseconds else "")


def _frames(error: BaseException) -> tuple[FrameType | None, FrameType | None]:
    """Return our frame that called a collective, and torch's frame of the collective."""
    caller = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = _module(frame)
        if module == _TORCH and not frame.f_code.co_name.startswith("_"):
            return caller, frame
        if module.startswith(_OURS) and module not in _NOT_CALLERS:
            caller = frame
    return caller, None


def _function(frame: FrameType) -> str:
    return f"{_module(frame).removeprefix(_OURS)}.{frame.f_code.co_name}"


def _size(call: FrameType) -> str:
    tensor = next((v for v in call.f_locals.values() if isinstance(v, Tensor)), None)
    if tensor is None:
        return ""
    return _elements(tensor.numel(), tensor.dtype)


def _elements(number: int, dtype: torch.dtype) -> str:
    return f" of {number:,} {str(dtype).removeprefix('torch.')}"


def _group(call: FrameType) -> str:
    return _describe_group(call.f_locals.get("group") or dist.group.WORLD)


def _describe_group(group: Any) -> str:
    name = getattr(group, "group_desc", "")
    ranks = _listed(dist.get_process_group_ranks(group))
    return f"{'all' if name in _DEFAULT_GROUP else name} ranks {ranks}"


def _listed(ranks: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown}, .. {ranks[-1]}"
