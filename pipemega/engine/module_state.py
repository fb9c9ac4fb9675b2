"""The state_dict of a model under other names: those of the module of `from_module`."""

import os
from pathlib import Path

from torch import Tensor

from pipemega.checkpoint.save_load import open_path
from pipemega.engine.engine import Engine
from pipemega.errors import CheckpointError, ConfigError
from pipemega.pipeline.model.module import PipelineModule

_KINDS = ("parameters/", "buffers/")


def module_state_dict(
    net: PipelineModule, source: Engine | str | Path, tag: str | None = None
) -> dict[str, Tensor]:
    """Return the state_dict of the module of `from_module`, for `module.load_state_dict`.

    A ResNet (`model.type` "resnet") has the names of torchvision's models.

    From an engine it is collective, and every rank gets all tensors. From a checkpoint of any mesh
    it runs in one process without torch.distributed.

    Args:
        net: the pipeline of the module.
        source: the engine that trains `net`, or a folder of checkpoints, or one checkpoint.
        tag: the checkpoint in the folder; None: the newest undamaged one.

    Returns:
        Name in the module -> full tensor on the CPU; with bf16 or fp16 the fp32 master weights.
        Tensors that no layer uses are missing.

    Raises:
        ConfigError: `net` has no other names.
        CheckpointError: the checkpoint cannot be read, or belongs to another model.
    """
    names = net.state_names()
    if names is None:
        raise ConfigError(
            "module_state_dict: the model was not made by PipelineModule.from_module, and is no "
            "ResNet, so its parameters have only their logical names: use engine.parameter_state()"
        )
    if isinstance(source, Engine):
        tensors = source.parameter_state() | source.buffer_state()
        return {name: tensors[logical] for name, logical in names.items()}
    reader = open_path(os.fspath(source), tag)
    stored = {
        key.partition("/")[2]: key for key in reader.tensors.tensors if key.startswith(_KINDS)
    }
    missing = [f"{logical} ({name})" for name, logical in names.items() if logical not in stored]
    if missing:
        raise CheckpointError(
            f"{reader.full_path} has no {missing[0]}, and lacks {len(missing)} of the "
            f"{len(names)} tensors of the module: it is a checkpoint of another model, or of "
            f"other layers of it; it has {', '.join(sorted(stored)[:4])}, ..."
        )
    read = {logical: reader.tensors.read_full(stored[logical]) for logical in set(names.values())}
    return {name: read[logical] for name, logical in names.items()}
