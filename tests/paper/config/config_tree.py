"""All keys that a config may have, and for each object a config that contains it."""

from collections.abc import Iterator
from typing import Any

from pipemega.config.config import MODEL_TYPES, Config
from pipemega.config.declarations import Section, key_info
from pipemega.config.reference_pages import all_sections
from pipemega.config.sections import optimizer_section, scheduler_section
from pipemega.config.sections.hf_section import HFSection

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "model": MODEL,
    "training": {"train_steps": 100},
}

# Required keys of `params` and of types of `model`, by class.
REQUIRED: dict[type[Section], dict[str, Any]] = {
    HFSection: {"path": "folder"},
    scheduler_section.OneCycleParams: {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    scheduler_section.WsdParams: {"wsd_decay_steps": 10},
}


def objects() -> Iterator[tuple[tuple[str, ...], dict[str, Any], dict[str, str]]]:
    """Yield (path of an object, a config that contains it, {key: the key to suggest for it})."""
    for _, path, kind in all_sections():
        names = {name: name for name in kind.model_fields} | dict(kind.old_names)
        yield path, _containing(path, kind), names
        for name, field in kind.model_fields.items():
            if keys := key_info(field).get("keys"):
                yield (*path, name), _put(BASE, (*path, name), {}), {key: key for key in keys}


def _containing(path: tuple[str, ...], kind: type[Section]) -> dict[str, Any]:
    if path[-1:] == ("params",):
        table: Any = (
            optimizer_section.PARAMS if path[0] == "optimizer" else scheduler_section.PARAMS
        )
        name = next(name for name, params in table.items() if params is kind)
        return {**BASE, path[0]: {"type": name, "params": REQUIRED.get(kind, {})}}
    if path in (("optimizer",), ("scheduler",)):
        return {**BASE, path[0]: {"type": "Adam" if path[0] == "optimizer" else "constant"}}
    if kind in MODEL_TYPES[1:]:
        word = kind.model_fields["type"].default
        return {**BASE, "model": {"type": word, **REQUIRED.get(kind, {})}}
    return BASE if kind is Config or path == ("model",) else _put(BASE, path, {})


def _put(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return `tree` with the members of `value` added to the object at `path`."""
    if not path:
        return {**tree, **value}
    below = tree.get(path[0], {})
    return {**tree, path[0]: _put(below, path[1:], value)}


def put(tree: dict[str, Any], path: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `tree` with one more key in the object at `path`."""
    result: dict[str, Any] = _put(tree, path, {key: value})
    return result
