"""The error of an unknown key: the key that is probably meant, or where keys of your own belong.

Refuses arguments that DeepSpeed's functions have and ours do not, with what to set instead.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipemega.config.declarations import Section, key_info, section_type
from pipemega.config.name_suggestions import did_you_mean, edit_distance, nearest, suggestion
from pipemega.config.sections.pipeline_sections import ONLY_1D
from pipemega.config.source import Invalid, KeyPath, dotted, show
from pipemega.errors import ConfigError

# Names of other systems, without `_`, `-` and upper case -> our key.
_OTHER_NAMES = {
    "maxgradnorm": "gradient_clipping",
    "clipgrad": "gradient_clipping",
    "clipgradnorm": "gradient_clipping",
    "gradclip": "gradient_clipping",
    "gradientclip": "gradient_clipping",
    "learningrate": "optimizer.params.lr",
    "batchsize": "train_batch_size",
    "globalbatchsize": "train_batch_size",
    "microbatchsize": "train_micro_batch_size_per_gpu",
    "trainmicrobatchsize": "train_micro_batch_size_per_gpu",
    "perdevicetrainbatchsize": "train_micro_batch_size_per_gpu",
    "nummicrobatches": "gradient_accumulation_steps",
    "microbatches": "gradient_accumulation_steps",
    "gradientaccumulation": "gradient_accumulation_steps",
    "numchunks": "pipeline.chunks",
    "tensorshape": "pipeline.shapes",
    "numstages": "pipeline.stages",
    "pipelineparallelsize": "mesh.pipeline",
    "pipeparallelsize": "mesh.pipeline",
    "pipelinemodelparallelsize": "mesh.pipeline",
    "ppsize": "mesh.pipeline",
    "pp": "mesh.pipeline",
    "modelparallelsize": "mesh.tensor",
    "tensorparallelsize": "mesh.tensor",
    "tensormodelparallelsize": "mesh.tensor",
    "tpsize": "mesh.tensor",
    "tp": "mesh.tensor",
    "mpsize": "mesh.tensor",
    "sequenceparallelsize": "mesh.sequence_parallel",
    "dataparallelsize": "mesh.data",
    "dpsize": "mesh.data",
    "partitionmethod": "pipeline.partition",
    "zero": "zero_optimization",
    "zerostage": "zero_optimization.stage",
    "optlevel": "fp16.enabled",
    "epochs": "training.epochs",
    "numtrainepochs": "training.epochs",
    "numepochs": "training.epochs",
    "trainiters": "training.train_steps",
    "maxsteps": "training.train_steps",
    "trainsteps": "training.train_steps",
    "lrscheduler": "scheduler",
    "mixedprecision": "bf16.enabled",
    "gradientcheckpointing": "pipeline.activation_checkpoint_interval",
}
_MOST_PLACES = 3


def unknown_key(
    root: type[Section], kind: type[Section], key: str, raw: Mapping[str, Any], path: KeyPath
) -> tuple[Invalid, list[KeyPath]]:
    """Return the error of the unknown `key` of the object at `path`, and the keys that are meant.

    Args:
        root: section of the whole config.
        kind: section of the object.
        raw: the object.
    """
    if not path and (mesh := _mesh_of_colossal(key, raw[key])):
        text = f"'{key}' is a section of Colossal-AI: write \"mesh\": {show(mesh)} in its place"
        return Invalid((key,), f"{text}; {ONLY_1D}"), [("mesh",)]
    names = probably_meant(root, kind, key, raw, path)
    hint = suggestion(names) if names else did_you_mean(key, kind.model_fields)
    if not names and not path:
        hint += (
            "; a key of your own belongs in the section 'user' (`pipemega config from-deepspeed` "
            "moves it there), docs/config.md lists the others"
        )
    error = Invalid((*path, key), f"unknown key '{dotted((*path, key))}'{hint}")
    # A name without a dot is one of this object.
    return error, [tuple(name.split(".")) if "." in name else (*path, name) for name in names]


def probably_meant(
    root: type[Section], kind: type[Section], key: str, raw: Mapping[str, Any], path: KeyPath
) -> list[str]:
    """Return the names of the keys that are probably meant: of this object, or dotted paths."""
    other = _OTHER_NAMES.get(re.sub(r"[_\-]", "", key.lower()))
    near = nearest(key, (*kind.model_fields, *kind.old_names))
    is_typo = any(edit_distance(key, name, limit=2) <= 2 for name in near)
    if other is not None and not is_typo:
        return [other]
    below = [
        dotted((*path, name, key))
        for name, part in _sections_below(kind, raw)
        if key in part.model_fields
    ]
    if near or below:
        return [kind.old_names.get(name, name) for name in near] + below
    elsewhere = (
        f"{name}.{key}" for name, part in _sections_below(root, {}) if key in part.model_fields
    )
    return list(elsewhere)[:_MOST_PLACES]


def _mesh_of_colossal(key: str, value: Any) -> dict[str, Any]:
    """Return our section `mesh` for Colossal-AI's `parallel` or `tensor`; {} if it is neither."""
    parts = value if key == "parallel" else {key: value} if key == "tensor" else None
    if not isinstance(parts, Mapping):
        return {}
    sizes = {
        axis: part.get("size", 1) if isinstance(part, Mapping) else part
        for axis, part in parts.items()
        if axis in ("pipeline", "tensor", "data")
    }
    tensor = parts.get("tensor")
    if isinstance(tensor, Mapping) and tensor.get("mode") == "sequence":
        sizes["sequence_parallel"] = True
    return sizes


def _sections_below(
    kind: type[Section], raw: Mapping[str, Any]
) -> Iterator[tuple[str, type[Section]]]:
    """Yield (name, class) of the sections in a section; `type` gives the class of `params`."""
    for name, field in kind.model_fields.items():
        part = section_type(field.annotation)
        if part is not None and name in raw and key_info(field)["status"] == "honoured":
            part = kind.section_at(name, raw)
        if part is not None:
            yield name, part


_MESH = "set the sizes in the config section 'mesh'"
_REMEDIES: Mapping[str, str] = {
    # of deepspeed.initialize
    "args": "pass the path of the JSON file as config",
    "distributed_port": "torchrun sets the port",
    "mpu": _MESH,
    "mesh_param": _MESH,
    "dist_init_required": "initialize() starts torch.distributed if needed",
    "config_params": "pass it as config",
    # of deepspeed.pipe.PipelineModule
    "num_stages": "set mesh.pipeline in the config",
    "topology": _MESH,
    "partition_method": "set pipeline.partition in the config",
    "seed_layers": "set pipeline.seed_layers in the config",
    "base_seed": "set seed in the config",
    "activation_checkpoint_interval": "set pipeline.activation_checkpoint_interval in the config",
}


def refuse_arguments(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError if `given` is not empty; the same on every rank.

    Args:
        call: the function, for the message.
        given: names of arguments that it does not have.
        known: names of its arguments.
    """
    for name in given:
        remedy = _REMEDIES.get(name)
        hint = did_you_mean(name, known) if remedy is None else f": {remedy}"
        raise ConfigError(f"{call} has no argument {name!r}{hint}", on_every_rank=True)
