"""Weights of checkpoints that DeepSpeed wrote.

deepspeed_folder.py   finds the checkpoint in a folder, and reads tensors from its files
shard_rules.py        how tensor-parallel shards form a tensor
deepspeed_weights.py  all weights of a checkpoint, by DeepSpeed's names
weights_loading.py    loads them into a run, or writes them as a checkpoint of pipemega
"""

from typing import TYPE_CHECKING

from pipemega.lazy_imports import names_of

if TYPE_CHECKING:
    from pipemega.checkpoint.deepspeed.deepspeed_folder import NameRules, find_deepspeed
    from pipemega.checkpoint.deepspeed.deepspeed_weights import DeepSpeedWeights, ReadOptions
    from pipemega.checkpoint.deepspeed.weights_loading import (
        ImportOptions,
        import_deepspeed,
        load_deepspeed,
    )

__all__ = [
    "DeepSpeedWeights",
    "ImportOptions",
    "NameRules",
    "ReadOptions",
    "find_deepspeed",
    "import_deepspeed",
    "load_deepspeed",
]

_FOLDER = "pipemega.checkpoint.deepspeed"
# Imported on first use: most runs load no checkpoint of DeepSpeed.
__getattr__ = names_of(
    {
        "DeepSpeedWeights": f"{_FOLDER}.deepspeed_weights",
        "ImportOptions": f"{_FOLDER}.weights_loading",
        "NameRules": f"{_FOLDER}.deepspeed_folder",
        "ReadOptions": f"{_FOLDER}.deepspeed_weights",
        "find_deepspeed": f"{_FOLDER}.deepspeed_folder",
        "import_deepspeed": f"{_FOLDER}.weights_loading",
        "load_deepspeed": f"{_FOLDER}.weights_loading",
    }
)
