"""Weights of checkpoints that DeepSpeed wrote.

deepspeed_folder.py   which checkpoint of a folder, and which files it has
torch_files.py        reads a file with `weights_only`; objects of other classes are left out
stored_tensor.py      a tensor as pieces of the tensors in files
shard_rules.py        how tensor-parallel shards form a tensor
fused_attention.py    the order of the rows of a fused query_key_value weight
zero_masters.py       fp32 master weights in the optimizer files of ZeRO
deepspeed_weights.py  all weights of a checkpoint, by DeepSpeed's names
import_names.py       DeepSpeed's names -> logical names
weights_loading.py    loads the weights into the model of a run
deepspeed_import.py   writes the weights as a checkpoint of pipemega
"""

from typing import TYPE_CHECKING

from pipemega.startup.deferred_import import names_of

if TYPE_CHECKING:
    from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
    from pipemega.checkpoint.deepspeed.deepspeed_import import ImportOptions, import_deepspeed
    from pipemega.checkpoint.deepspeed.deepspeed_weights import DeepSpeedWeights, ReadOptions
    from pipemega.checkpoint.deepspeed.import_names import NameRules
    from pipemega.checkpoint.deepspeed.weights_loading import load_deepspeed

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
        "ImportOptions": f"{_FOLDER}.deepspeed_import",
        "NameRules": f"{_FOLDER}.import_names",
        "ReadOptions": f"{_FOLDER}.deepspeed_weights",
        "find_deepspeed": f"{_FOLDER}.deepspeed_folder",
        "import_deepspeed": f"{_FOLDER}.deepspeed_import",
        "load_deepspeed": f"{_FOLDER}.weights_loading",
    }
)
