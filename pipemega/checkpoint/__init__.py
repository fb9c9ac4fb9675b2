"""Saving and loading checkpoints: logical tensors, any mesh to any mesh, atomic, with checksums.

checkpointer.py    Checkpointer: save and load of one engine
tensors.py         which tensors a checkpoint contains; tensors.py: this rank's part of each
save_load.py       write, verify and open a checkpoint; async_save.py: in the background
differences.py     what differs between the checkpoint and the run, and what is refused
save_load.py       open a checkpoint by its path in one process
layout.py          the folder of checkpoints; manifest.py: state.json; dcp_storage.py: tensor files
deepspeed/         weights of checkpoints that DeepSpeed wrote
manifest.py   the same error on all ranks
"""

from pipemega.checkpoint.checkpointer import Checkpointer, Counters, Loaded, any_checkpoint, newest
from pipemega.checkpoint.layout import step_tag
from pipemega.checkpoint.tensors import LoadOptions

__all__ = [
    "Checkpointer",
    "Counters",
    "LoadOptions",
    "Loaded",
    "any_checkpoint",
    "newest",
    "step_tag",
]
