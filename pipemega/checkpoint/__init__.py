"""Saving and loading: logical tensors, in folders that are whole at every moment."""

from pipemega.checkpoint.folder import prune, step_tag
from pipemega.checkpoint.store import RunState, Stored, load, save
from pipemega.checkpoint.tensors import (
    logical_tensors,
    own_buffers,
    restore,
    room_for,
    step_state,
)

__all__ = [
    "RunState",
    "Stored",
    "load",
    "logical_tensors",
    "own_buffers",
    "prune",
    "restore",
    "room_for",
    "save",
    "step_state",
    "step_tag",
]
