"""Which meeting of ranks an error comes from: what was summed or gathered, by whom, for what.

Backends say "connection closed" or "timed out" and nothing else. What they were at stands in the
trace of the error: torch's function, its tensor and its group, and who called it. So every meeting
has a name, those of the user's own script too, and no call has to carry one along. Only where a
rank waits for a meeting that it began earlier is there nothing to be read: see `meeting`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipemega.errors import PipelineError

_TORCH = "torch.distributed.distributed_c10d"
_OURS = "pipemega."
# They are below every error, and call nothing by themselves.
_BELOW = ("pipemega.failure", "pipemega.launch")
# What torch calls the group of all ranks.
_NO_NAMES = ("", "undefined", "default_pg")


@contextmanager
def meeting(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """Names a wait for a meeting that was begun earlier.

    Args:
        what: as in "the all-reduce of a tensor-parallel layer".
        ranks: the global ranks that meet.

    Raises:
        PipelineError: the backend failed within; says what, and among whom.
    """
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(f"{what} over ranks {_listed(ranks)}: {brief(str(error))}") from error


def described(error: BaseException) -> str:
    """The error, with the meeting that it comes from if it is of one.

    all_reduce of 1,024 float32 over data ranks 0, 2 in gradients.reduce_data: Connection closed
    """
    caller, call = _met_in(error)
    said = brief(str(error))
    if call is None:
        return f"{type(error).__name__}: {said}" if caller is None else f"{_place(caller)}: {said}"
    where = "" if caller is None else f" in {_place(caller)}"
    return f"{call.f_code.co_name}{_size(call)} over {_group(call)}{where}: {said}"


def brief(text: str) -> str:
    """The first line, without what gloo adds: its source file, and good advice."""
    line = (text.splitlines() or [""])[0]
    line = re.sub(r"\[/\S+:\d+\] |\. This is typically caused by a remote worker.*", "", line)
    return re.sub(
        r"[Tt]imed out waiting (\d+)ms for \w+ operation to complete",
        lambda m: f"timed out after mesh.timeout_seconds ({int(m[1]) / 1000:g} s)",
        line,
    )


def _met_in(error: BaseException) -> tuple[FrameType | None, FrameType | None]:
    """Our innermost frame before torch's, and torch's outermost behind it."""
    caller = call = None
    trace = error.__traceback__
    while trace is not None and call is None:
        frame = trace.tb_frame
        name = str(frame.f_globals.get("__name__", ""))
        if name == _TORCH and not frame.f_code.co_name.startswith("_"):
            call = frame
        elif name.startswith(_OURS) and name not in _BELOW:
            caller = frame
        trace = trace.tb_next
    return caller, call


def _place(frame: FrameType) -> str:
    module = str(frame.f_globals["__name__"]).removeprefix(_OURS)
    return f"{module}.{frame.f_code.co_name}"


def _size(call: FrameType) -> str:
    tensor = next((v for v in call.f_locals.values() if isinstance(v, Tensor)), None)
    if tensor is None:
        return ""
    return f" of {tensor.numel():,} {str(tensor.dtype).removeprefix('torch.')}"


def _group(call: FrameType) -> str:
    group: Any = call.f_locals.get("group") or dist.group.WORLD
    name = getattr(group, "group_desc", "")
    ranks = _listed(dist.get_process_group_ranks(group))
    return f"{'all' if name in _NO_NAMES else name} ranks {ranks}"


def _listed(ranks: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown}, .. {ranks[-1]}"
