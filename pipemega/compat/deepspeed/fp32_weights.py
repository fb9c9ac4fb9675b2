"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, for a module in one process."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.checkpoint.deepspeed.deepspeed_weights import read_deepspeed
from pipemega.checkpoint.save_load import open_path
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import is_remote

_KINDS = ("parameters/", "buffers/")
# A module that is no pipeline is the only layer.
_MODULE = "layers.0."


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of pipemega or DeepSpeed, on the CPU; not collective.

    Args:
        checkpoint_dir: a folder of checkpoints, or one checkpoint.
        tag: the checkpoint in the folder; None: the newest one.
        exclude_frozen_parameters: has no effect: all parameters are returned.

    Returns:
        Name -> tensor; the names of a module that is no pipeline are its own. A parameter that the
        module has under several names is there under the first: load the result with strict=False.
        Floating-point tensors are in fp32, those of a model in fp64 too.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or has no shapes.
    """
    foreign = None if is_remote(checkpoint_dir) else find_deepspeed(checkpoint_dir, tag)
    if foreign is not None:
        weights = read_deepspeed(foreign)
        if weights.is_flat:
            raise CheckpointError(
                f"{foreign} does not say the shapes of its tensors: load it with "
                "engine.load_checkpoint(), or convert it with `pipemega checkpoint "
                "import-deepspeed`"
            )
        # Copies: `full` may be a view of the file.
        return {name: _fp32(tensor.full().clone()) for name, tensor in weights.tensors.items()}
    reader = open_path(os.fspath(checkpoint_dir), tag)
    names = {key.partition("/")[2]: key for key in reader.tensors.tensors if key.startswith(_KINDS)}
    is_module = all(name.startswith(_MODULE) for name in names)
    return {
        name.removeprefix(_MODULE) if is_module else name: _fp32(reader.tensors.read_full(key))
        for name, key in names.items()
    }


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load `get_fp32_state_dict_from_zero_checkpoint` into a module on the CPU; return it."""
    model = model.cpu()
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, tag: str | None = None
) -> None:
    """Write `get_fp32_state_dict_from_zero_checkpoint` to `output_dir`/pytorch_model.bin."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    torch.save(state, folder / "pytorch_model.bin")


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
