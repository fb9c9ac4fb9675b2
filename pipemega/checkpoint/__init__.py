"""Saving and loading: logical tensors, in folders that are whole at every moment."""

from pipemega.checkpoint.folder import prune
from pipemega.checkpoint.store import Report, RunState, Stored, load, save
from pipemega.checkpoint.tensors import logical_tensors, restore, room_for

__all__ = [
    "Report",
    "RunState",
    "Stored",
    "load",
    "logical_tensors",
    "prune",
    "restore",
    "room_for",
    "save",
]
