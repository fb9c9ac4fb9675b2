"""Saving and loading: logical tensors, in folders that are whole at every moment."""

from pipemega.checkpoint.disk import is_remote
from pipemega.checkpoint.folder import step_tag
from pipemega.checkpoint.keeper import Checkpoints, Counters, Loaded, newest
from pipemega.checkpoint.options import LoadOptions

__all__ = [
    "Checkpoints",
    "Counters",
    "LoadOptions",
    "Loaded",
    "is_remote",
    "newest",
    "step_tag",
]
