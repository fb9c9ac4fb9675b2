"""CUDA events in the current stream."""

from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream; occurs when all work before it is complete."""

    def query(self) -> bool:
        """Return whether it has occurred."""

    def synchronize(self) -> None:
        """Make the host wait until it occurs."""


def record_event(*, timing: bool = False) -> Any:
    """Record an event in the current stream, and return it.

    Args:
        timing: whether `elapsed_time` of two such events is wanted.
    """
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record()
    return event
