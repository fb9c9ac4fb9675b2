"""Loads the weights of a DeepSpeed checkpoint into a model; each rank reads only its shards.

Writes the weights of a DeepSpeed checkpoint as a checkpoint of pipemega.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipemega.checkpoint import differences, layout, save_load, tensors
from pipemega.checkpoint.deepspeed.deepspeed_folder import (
    NameRules,
    StoredTensor,
    find_deepspeed,
    other_tags,
)
from pipemega.checkpoint.deepspeed.deepspeed_weights import (
    DeepSpeedWeights,
    ReadOptions,
    read_deepspeed,
)
from pipemega.checkpoint.differences import TensorDifference
from pipemega.checkpoint.manifest import CollectiveIO
from pipemega.checkpoint.save_load import RunState, serialize, serialize_client_state
from pipemega.checkpoint.tensors import LoadOptions, TensorShard
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.errors import CheckpointError
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.model.module import TiedParameter
from pipemega.pipeline.model.stages import LocalModel
from pipemega.printing import listed
from pipemega.storage.filesystem import is_remote, storage_at

_log = logging.getLogger(__name__)


def load_deepspeed(
    path: Path,
    model: LocalModel,
    step: OptimizerStep | None,
    mesh: Mesh,
    options: LoadOptions,
    ranks: CollectiveIO,
) -> DeepSpeedWeights:
    """Load the weights of the checkpoint `path`; rank 0 logs what is not loaded.  Collective.

    The optimizer state, the LR schedule, the step and the position in the data are not loaded.

    Args:
        options: only the option `strict` is used.

    Raises:
        CheckpointError: the checkpoint is damaged, or has another model; on every rank.
    """
    shards = tensors.model_tensors(model, step, mesh)
    in_run, others = tensors.names_in_run(shards, model, ranks)
    tied_of = {position: tied for tied in model.ties for position, _ in tied.places}
    slices = _consecutive_slices(shards, mesh.tensor, ranks)
    read_options = ReadOptions(
        in_run={
            source: in_run[name]
            for name in slices
            for source in _source_names(name.partition("/")[2], tied_of)
        },
        tensor_size=mesh.tensor.size,
    )
    weights = ranks.run_on_all(lambda: read_deepspeed(path, read_options))
    stored = _by_run_name(in_run, others, weights, tied_of)
    _refuse_other_parts(stored, slices, mesh.tensor.size, path)
    is_replica = not mesh.is_first_replica
    index = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    found = differences.tensor_differences(index, shards, is_replica, ranks)
    if options.strict:
        # A universal checkpoint contains only what the optimizer updates.
        without = [d for d in found if weights.kind == "universal" and _is_missing_buffer(d)]
        differences.refuse_differences(str(path), [d for d in found if d not in without])
        if without and ranks.is_rank0:
            differences.log_differences(str(path), without)
    elif ranks.is_rank0:
        differences.log_differences(str(path), found)
    different = {difference.name for difference in found}
    fits = {name: s for name, s in shards.items() if name in stored and name not in different}

    def read() -> None:
        for name, shard in fits.items():
            stored[name].copy_into(shard)

    ranks.run_on_all(read)
    module_only = LoadOptions(module_only=True)
    tensors.restore(fits, {}, {}, model, step, module_only)
    if ranks.is_rank0:
        _log_loaded(weights, options)
    return weights


def _consecutive_slices(
    shards: Mapping[str, TensorShard], axis: Axis, ranks: CollectiveIO
) -> list[str]:
    """Return the keys of all ranks whose shards are equal consecutive slices; collective."""
    mine = {
        name: one.shard.ranges
        == ((axis.rank * one.local_shape[dim], (axis.rank + 1) * one.local_shape[dim]),)
        for name, one in shards.items()
        if (dim := one.shard.dim) is not None
    }
    found = ranks.all_gather(mine)
    others = {name for one in found for name, is_slice in one.items() if not is_slice}
    return sorted({name for one in found for name in one} - others)


def _refuse_other_parts(
    stored: Mapping[str, StoredTensor], slices: Iterable[str], tensor_size: int, path: Path
) -> None:
    for name in slices if tensor_size > 1 else ():
        parts = stored[name].parts if name in stored else 1
        if parts > 1:
            raise CheckpointError(
                f"each tensor-parallel shard of {name} in {path} has a slice of each of "
                f"{parts} parts (such as gate and up), and each of the {tensor_size} tensor ranks "
                f"of this run needs one consecutive slice of the whole: load it on as many tensor "
                f"ranks as DeepSpeed had, or on 1"
            )


def _is_missing_buffer(difference: TensorDifference) -> bool:
    return difference.stored is None and difference.name.startswith("buffers/")


def describe_left_out(weights: DeepSpeedWeights) -> str | None:
    """Return which objects of the files were not loaded; None: all were."""
    classes = sorted({name for names in weights.left_out.values() for name in names})
    if not classes:
        return None
    return (
        f"objects of these classes were left out, because loading them would run their code: "
        f"{listed(classes)}"
    )


def _log_loaded(weights: DeepSpeedWeights, options: LoadOptions) -> None:
    kind = "fp32 master weights" if weights.has_masters else "weights"
    _log.info("loaded the %s of %s: %.1f MB", kind, weights.path, weights.nbytes / 1e6)
    if not options.module_only:
        _log.warning(
            "%s was saved by DeepSpeed: the optimizer state, the loss scale, the LR schedule, the "
            "step (%d) and the position in the data are not loaded",
            weights.path,
            weights.global_steps,
        )
    if (left_out := describe_left_out(weights)) is not None:
        _log.warning("%s: %s", weights.path, left_out)


def _by_run_name(
    in_run: Mapping[str, tuple[int, ...]],
    others: Collection[str],
    weights: DeepSpeedWeights,
    tied_of: Mapping[int, TiedParameter],
) -> dict[str, StoredTensor]:
    """Return the tensors by the names of the run; those that the run has not as parameters/...

    Args:
        in_run: "parameters/layers.3.weight" -> shape; of all ranks.
        others: further names of shared parameters.
        tied_of: position -> the shared parameter of its layer.
    """
    # DeepSpeed's files have a shared parameter under each of its names.
    copies = {s for name in others for s in _source_names(name, {})}
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, shape in in_run.items():
        for source in _source_names(name.partition("/")[2], tied_of):
            if source in weights.tensors:
                tensor = weights.tensors[source]
                fits = weights.is_flat and tensor.numel == torch.Size(shape).numel()
                found[name] = tensor.reshaped(shape) if fits else tensor
                used.add(source)
                break
    for source in weights.tensors.keys() - used:
        if source not in copies:
            found[f"parameters/{source}"] = weights.tensors[source]
    return found


def _source_names(logical: str, tied_of: Mapping[int, TiedParameter]) -> Iterator[str]:
    """Yield the names that DeepSpeed may have for a logical name."""
    _, position, inner = logical.split(".", 2)
    yield f"{position}.{inner}"
    tied = tied_of.get(int(position))
    if tied is not None:
        # Tied layers are one module in DeepSpeed, which is stored once.
        yield f"{tied.places[0][0]}.{inner}"
        yield f"tied_modules.{tied.key}.{inner}"
    yield inner


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import.

    Args:
        tag: the checkpoint in the folder; None: the one that `latest` names.
        read: how the files are read.
        names: DeepSpeed's names -> logical names, where the default does not fit.
        config: the config of the run that will load the weights; it is stored with them.
    """

    tag: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    names: NameRules = field(default_factory=NameRules)
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ImportSummary:
    """What was imported.

    Args:
        path: the path of the checkpoint that was written.
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
