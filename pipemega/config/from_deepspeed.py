"""Explain a DeepSpeed file key by key, and convert it to a config without what has no effect."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipemega.config.batch import MICRO, STEPS, TRAIN
from pipemega.config.builder import Draft, examine
from pipemega.config.config import Config
from pipemega.config.declarations import STAGE_3_NAMES, InvalidType, Section, key_info
from pipemega.config.sections.optimizer_section import PARAMS, REFUSED
from pipemega.config.source import Invalid, KeyPath, dotted, override, read, show
from pipemega.errors import ConfigError

_STAGE = ("zero_optimization", "stage")
_BATCH = ((TRAIN,), (MICRO,), (STEPS,))
_OPTIMIZER = ("optimizer", "type")


class Explained(NamedTuple):
    """One key of the file.

    Args:
        status: "honoured", "ignored", "changed", "default" (was "auto"), "user", "needed" (a value
            must be set) or "refused".
        text: the key and its value, and the reason.
    """

    path: KeyPath
    status: str
    text: str


class Explanation(NamedTuple):
    """A DeepSpeed file, explained.

    Args:
        keys: every key of the file, in its order.
        notes: remarks about the config as a whole.
        overrides: what to add as `--set`, with a choice that trains what the file describes if
            there is one.
        tree: the config, as JSON values.
        is_complete: it can run, and trains what the file describes.
    """

    keys: tuple[Explained, ...]
    notes: tuple[str, ...]
    overrides: tuple[str, ...]
    tree: Mapping[str, Any]
    is_complete: bool


def explain(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    world: int | None = None,
) -> Explanation:
    """Explain the file.

    Args:
        overrides: changes of its keys, as for `load`.
        world: number of ranks.

    Raises:
        ConfigError: the file does not exist or is not a JSON object, or an override is not
            KEY=VALUE.
    """
    found = override(read(source), overrides)
    if not isinstance(found.tree, Mapping):
        raise ConfigError(f"the config must be an object, not {show(found.tree)}")
    errors = {error.path: error.message for error in found.errors}
    needed: dict[str, None] = {}
    tree = found.tree
    while True:
        draft = examine(tree, world=world, adopt=True)
        remaining = tree
        for error in draft.errors:
            errors.setdefault(error.path, error.message)
            needed |= dict.fromkeys(_overrides_for(error, found.tree))
            remaining = _corrected(remaining, error)
        if remaining == tree:
            break
        tree = remaining
    config = None if draft.errors else draft.config
    lines = tuple(_Lines(errors, draft).of(Config, found.tree, ()))
    told = {line.path for line in lines}
    missing = [
        Explained(path, _status_of_error(path, message), message)
        for path, message in errors.items()
        if not any(path[:length] in told for length in range(1, len(path) + 1))
    ]
    return Explanation(
        (*lines, *missing),
        () if config is None else tuple(_notes(config, lines)),
        tuple(needed),
        draft.source.tree if config is None else config.given(),
        is_complete=config is not None and errors.keys() <= {_STAGE},
    )


def _status_of_error(path: KeyPath, message: str) -> str:
    if path == _STAGE:
        return "changed"
    return "needed" if path in _BATCH or _needs_length(path, message) else "refused"


def _overrides_for(error: Invalid, tree: Any) -> Iterator[str]:
    """Yield the overrides that correct the error, if they are known; N stands for a number."""
    if error.path == _STAGE:
        yield f"{dotted(_STAGE)}=1"
    elif error.path in _BATCH and "auto" in [tree.get(name) for (name,) in _BATCH]:
        yield from (f"{MICRO}=N", f"{STEPS}=N")
    elif error.path in _BATCH and "batch size is not set" in error.message:
        yield f"{MICRO}=N"
    elif error.path == _OPTIMIZER and (instead := _other_optimizer(tree)) is not None:
        yield f"{dotted(_OPTIMIZER)}={instead}"
    elif _needs_length(error.path, error.message):
        yield "training.train_steps=N"


def _needs_length(path: KeyPath, message: str) -> bool:
    return path == ("scheduler",) and "training.train_steps" in message


def _other_optimizer(tree: Any) -> str | None:
    """Return the type to use instead of a refused one; None if the type is unknown."""
    others = {name.lower(): instead for name, (_, instead) in REFUSED.items()}
    return others.get(str(tree["optimizer"].get("type")).lower())


def _corrected(tree: Any, error: Invalid) -> Any:
    """Return the tree with stage 1, with another optimizer, or without the key with the error.

    A key that the run needs stays as it is.
    """
    path = error.path
    if path == _STAGE:
        return {**tree, _STAGE[0]: {**tree[_STAGE[0]], _STAGE[1]: 1}}
    if path == _OPTIMIZER and (instead := _other_optimizer(tree)) is not None:
        section = tree["optimizer"]
        names = PARAMS[instead].model_fields
        params = {key: v for key, v in dict(section.get("params") or {}).items() if key in names}
        return {**tree, "optimizer": {**section, "type": instead, "params": params}}
    if path in (*_BATCH, _OPTIMIZER) or _needs_length(path, error.message):
        return tree
    field = Config.model_fields.get(path[0]) if path else None
    is_block = field is not None and key_info(field)["status"] == "block"
    for depth in range(1 if is_block else len(path), 0, -1):
        if (found := _without(tree, path[:depth])) is not None:
            return found
    return tree


def _without(tree: Any, path: KeyPath) -> Any:
    """Return the tree without the key at `path`; None if it has no such key."""
    if not isinstance(tree, Mapping) or path[0] not in tree:
        return None
    if len(path) == 1:
        return {key: value for key, value in tree.items() if key != path[0]}
    below = _without(tree[path[0]], path[1:])
    return None if below is None else {**tree, path[0]: below}


class _Lines:
    """Explains the keys of each object of the file.

    Args:
        errors: path of the key -> error text, for all errors of the file.
        draft: the draft of the file without the keys that have errors.
    """

    def __init__(self, errors: Mapping[KeyPath, str], draft: Draft) -> None:
        self._errors = dict(errors)
        self._autos = set(draft.builder.autos)
        self._adopted = draft.config.adopted_keys if draft.config is not None else ()

    def of(self, kind: type[Section], raw: Mapping[str, Any], path: KeyPath) -> Iterator[Explained]:
        """Yield the keys of the object `raw`, which is of type `kind`."""
        for key, value in raw.items():
            here = (*path, key)
            name = kind.old_names.get(key, key)
            field = kind.model_fields.get(name)
            below = None if field is None else _section_at(kind, name, raw)
            if below is None or not isinstance(value, Mapping):
                yield Explained(here, *self._status(kind, value, here))
                continue
            yield from self.of(below, value, here)
            if here in self._errors:
                error = self._errors[here]
                yield Explained(here, _status_of_error(here, error), error)

    def _status(self, kind: type[Section], value: Any, path: KeyPath) -> tuple[str, str]:
        shown = f"{dotted(path)} {show(value)}"
        error = self._errors.get(path) or self._error_below(path)
        if error is not None:
            status = _status_of_error(path, error)
            return status, f"{shown} -> 1: {error}" if path == _STAGE else error
        if path[0] in self._adopted:
            return "user", f"{shown} -> user.{path[0]}: a key of your own"
        name = kind.old_names.get(path[-1], path[-1])
        field = kind.model_fields.get(name)
        if field is None:
            return "refused", f"{shown}: it is a key of the optimizer that is refused"
        found = key_info(field)
        if path in self._autos:
            return "default", f"{shown} -> {show(field.default)}{_filled(path)}"
        if found["status"] == "replaced":
            return "changed", f"{shown} -> {found['instead']}"
        if found["status"] == "ignored" and value not in found["agrees"]:
            return "ignored", f"{shown}: {found['why']}"
        if found["status"] == "block":
            return "ignored", f"{shown}: it is disabled, and not supported"
        renamed = name != path[-1] and found["status"] == "honoured"
        return "honoured", f"{shown} -> {name}" if renamed else shown

    def _error_below(self, path: KeyPath) -> str | None:
        found = [text for at, text in self._errors.items() if at[: len(path)] == path]
        return "; ".join(found) if found else None


def _section_at(kind: type[Section], name: str, raw: Mapping[str, Any]) -> type[Section] | None:
    """Return the type of the section at the key `name` of `raw`; None if it is not a section."""
    try:
        prepared = kind.prepare(raw)
    except InvalidType as error:
        prepared = error.instead
    except ValueError:
        prepared = None
    if not isinstance(prepared, Mapping) or name not in prepared:
        return None
    return kind.section_at(name, prepared)


def _filled(path: KeyPath) -> str:
    if path[0] in ("optimizer", "scheduler") or path[-1] == "enabled":
        return (
            "; the Trainer of transformers would fill it from its arguments: set it, as in "
            f"--set {dotted(path)}=VALUE"
        )
    return ""


def _notes(config: Config, lines: Sequence[Explained]) -> Iterator[str]:
    told = {dotted(path) for line in lines for path in _names_of(line.path)}
    for warning in config.warnings:
        key = warning.split(" ")[0]
        if key not in told and key != '"auto"':
            yield warning
    yield from config.notes


def _names_of(path: KeyPath) -> Iterator[KeyPath]:
    """Yield the path as it is in the file, and with the name that warnings use."""
    yield path
    if path[:1] == _STAGE[:1]:
        yield (*path[:-1], STAGE_3_NAMES.get(path[-1], path[-1]))


def as_json(explanation: Explanation) -> str:
    """Return the config as JSON text."""
    return json.dumps(explanation.tree, indent=2, ensure_ascii=False)
