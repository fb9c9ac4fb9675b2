"""Writes the weights of a DeepSpeed checkpoint as a checkpoint of pipemega."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipemega.checkpoint import layout, save_load
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed, other_tags
from pipemega.checkpoint.deepspeed.deepspeed_weights import (
    DeepSpeedWeights,
    ReadOptions,
    read_deepspeed,
)
from pipemega.checkpoint.deepspeed.import_names import NameRules
from pipemega.checkpoint.save_load import RunState, serialize, serialize_client_state
from pipemega.distributed.mesh import Axis
from pipemega.distributed.topology import Topology
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import is_remote, storage_at


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import.

    Args:
        tag: the checkpoint in the folder; None: the one that `latest` names.
        read: how the files are read.
        names: DeepSpeed's names -> logical names, where the default does not fit.
        config: of the run that will load the weights, to store with them.
    """

    tag: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    names: NameRules = field(default_factory=NameRules)
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ImportSummary:
    """What was imported.

    Args:
        path: of the checkpoint that was written.
        names: DeepSpeed's name -> logical name.
    """

    path: str
    weights: DeepSpeedWeights
    names: Mapping[str, str]


def open_deepspeed(folder: str, options: ReadOptions, tag: str | None = None) -> DeepSpeedWeights:
    """Return the weights of a checkpoint in `folder`, or of the checkpoint `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if is_remote(folder):
        raise CheckpointError(f"{folder} is a URL: copy the checkpoint to a local folder first")
    path = find_deepspeed(folder, tag)
    if path is None:
        tags = other_tags(Path(folder))
        where = folder if tag is None else f"{folder}/{tag}"
        raise CheckpointError(
            f"{where} contains no checkpoint of DeepSpeed: expected a folder with "
            f"layer_XX-model_states.pt or mp_rank_XX_model_states.pt files or a folder 'zero', or "
            f"the file 'latest' that names one"
            + (f"; {folder} contains {', '.join(tags)}: choose one with --tag" if tags else "")
        )
    return read_deepspeed(path, options)


def import_deepspeed(folder: str, out: str, options: ImportOptions) -> ImportSummary:
    """Write the weights of the checkpoint in `folder` as a checkpoint in the folder `out`.

    One process streams the weights: only shards that are averaged are in memory.

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, a name has no logical name, or
            the folder `out` cannot be written.
    """
    weights = open_deepspeed(folder, options.read, options.tag)
    if weights.is_flat:
        raise CheckpointError(
            f"{weights.path} was converted from ZeRO stage 3 and has no shapes, only flattened "
            f"parameters: load it with engine.load_checkpoint, where the model knows the shapes"
        )
    if not is_remote(out) and find_deepspeed(out) is not None:
        raise CheckpointError(
            f"{out} contains a checkpoint of DeepSpeed, whose file 'latest' would be replaced: "
            f"name another folder for the import"
        )
    names = options.names.translate(weights.tensors, weights.kind)
    if not names:
        raise CheckpointError("the name rules leave all tensors out: nothing would be written")
    tensors = {
        f"{'buffers' if name in weights.buffers else 'parameters'}/{logical}": weights.tensors[
            name
        ].outgoing()
        for name, logical in names.items()
    }
    shared = {
        "mesh": str(Topology()),
        "global_steps": weights.global_steps,
        "consumed_samples": int(weights.state.get("global_samples") or 0),
        "run": {},
        "optimizer_step": {},
        "loader": None,
        "config": dict(options.config or {}),
        "model": {},
        "weights_only": f"DeepSpeed {weights.state.get('ds_version', '')}".strip(),
    }
    state = RunState(tensors, shared, serialize({}), serialize_client_state(dict(weights.client)))
    tag = layout.step_tag(weights.global_steps)
    storage = storage_at(Path(out) if not is_remote(out) else out)
    save_load.save(storage, tag, state, Axis("world"))
    return ImportSummary(storage.full_path(tag), weights, names)
