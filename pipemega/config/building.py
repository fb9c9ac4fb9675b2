"""From plain values to sections, with messages that say where, what and what instead.  Floor 1."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipemega.config.keys import Section, choices, marks, section_in, spell
from pipemega.config.nearest import did_you_mean, nearest, one_of
from pipemega.config.reading import Invalid, KeyPath, dotted, show

S = TypeVar("S", bound=Section)


def build(kind: type[S], raw: Any, path: KeyPath = ()) -> S:
    """The section of that kind; those below it are built first.

    Raises:
        Invalid: the first thing that is wrong.
    """
    try:
        raw = kind.prepare(raw)
    except ValueError as error:
        raise Invalid(path, str(error)) from None
    if not isinstance(raw, Mapping):
        raise Invalid(path, f"{dotted(path)} must be an object, not {show(raw)}")
    raw = _renamed(kind, raw, path)
    for key in raw:
        if key not in kind.model_fields:
            raise _unknown(kind, key, path)
    values = {
        key: _value(kind, key, raw, path)
        for key, value in raw.items()
        if not _left_open(kind.model_fields[key], value)
    }
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explained(kind, error, values, path) from None


def _unknown(kind: type[Section], key: str, path: KeyPath) -> Invalid:
    known = (*kind.model_fields, *kind.old_names)
    # Right, but one floor too high: `schedule` belongs to `pipeline`.
    below = [
        f"{name}.{key}"
        for name, field in kind.model_fields.items()
        if (part := section_in(field.annotation)) is not None and key in part.model_fields
    ]
    names = [kind.old_names.get(name, name) for name in nearest(key, known)] + below
    hint = one_of(names) if names else did_you_mean(key, kind.model_fields)
    return Invalid((*path, key), f"unknown key '{dotted((*path, key))}'{hint}")


def _renamed(kind: type[Section], raw: Mapping[str, Any], path: KeyPath) -> Mapping[str, Any]:
    """Old names of keys -> new ones."""
    for old, new in kind.old_names.items():
        if old in raw and new in raw:
            raise Invalid(
                (*path, old), f"{old} is an old name of {new}, and both are given: keep one"
            )
    return {kind.old_names.get(key, key): value for key, value in raw.items()}


def _left_open(field: FieldInfo, value: Any) -> bool:
    """`"auto"` at a key of DeepSpeed's means what its absence means."""
    takes_it = marks(field).get("own") or "auto" in choices(field.annotation)
    return value == "auto" and not takes_it and not field.is_required()


def _value(kind: type[Section], key: str, raw: Mapping[str, Any], path: KeyPath) -> Any:
    """The value of one key; an object that is a section of ours is built."""
    field, value, here = kind.model_fields[key], raw[key], (*path, key)
    _check_status(field, value, here)
    below = kind.section_at(key, raw)
    if below is None or isinstance(value, Section):
        return value
    if not isinstance(value, Mapping) and _has_other_forms(field, value):
        return value
    return build(below, value, here)


def _has_other_forms(field: FieldInfo, value: Any) -> bool:
    """Whether the key takes more than an object; null counts only where null was written."""
    kinds = [kind for kind in get_args(field.annotation) if section_in(kind) is None]
    return any((kind is type(None)) is (value is None) for kind in kinds)


def _check_status(field: FieldInfo, value: Any, path: KeyPath) -> None:
    """Refuses what is not here; the reason stands beside the field."""
    found = marks(field)
    if found["status"] == "block":
        _check_block(found, value, path)
    elif found["status"] == "refused" and not _among(value, found["accepts"]):
        raise Invalid(path, f"{dotted(path)} cannot be {show(value)}: {found['why']}")
    for refused, why in found.get("reasons", {}).items():
        if _among(value, [refused]):
            raise Invalid(path, f"{dotted(path)} cannot be {show(value)}: {why}")


def _among(value: Any, values: Any) -> bool:
    # To Python, true is 1 and false is 0; to a config they are not.
    return any(value == other and isinstance(value, bool) is isinstance(other, bool)
               for other in values)  # fmt: skip


def _check_block(found: Mapping[str, Any], value: Any, path: KeyPath) -> None:
    if value is None or value is False:
        return
    if not isinstance(value, Mapping):
        raise Invalid(path, f"{dotted(path)} cannot be {show(value)}: {found['why']}")
    for key in value:
        if found["keys"] is not None and key not in found["keys"]:
            hint = did_you_mean(key, found["keys"])
            raise Invalid((*path, key), f"unknown key '{dotted((*path, key))}'{hint}")
    if (key := _switched_on(value, found["on"])) is not None:
        where = (*path, *key)
        raise Invalid(where, f"{dotted(where)} is on, and nothing here does it yet: {found['why']}")


def _switched_on(value: Mapping[str, Any], on: str) -> KeyPath | None:
    """The path of the key in a block that switches it on, or None."""
    if on == "any":
        return () if value else None
    for key in ["enabled"] if on == "nested" else on.split():
        if not _among(value.get(key), (None, "auto", False, 0)):
            return (key,)
    if on == "nested":
        for name, below in value.items():
            if isinstance(below, Mapping) and (path := _switched_on(below, on)) is not None:
                return (name, *path)
    return None


def _explained(
    kind: type[Section], error: ValidationError, values: Mapping[str, Any], path: KeyPath
) -> Invalid:
    """pydantic's findings in our words: the first in full, the keys of the others by name."""
    found: dict[str, Invalid] = {}
    for detail in error.errors(include_url=False):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        where = (*path, key) if key else path
        if key in found:  # each member of a union complains for itself
            continue
        if detail["type"] == "missing" and len(detail["loc"]) == 1:
            message = f"{dotted(where)} is missing, and has no default: {_meaning(kind, key)}"
        elif detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
        else:
            message = _wrong(kind.model_fields[key], values[key], where)
        found[key] = Invalid(where, message)
    first, *others = found.values()
    if others:
        names = ", ".join(dotted(other.path) for other in others)
        return Invalid(first.path, f"{first}; and look at {names}")
    return first


def _wrong(field: FieldInfo, value: Any, path: KeyPath) -> str:
    words = [word for word in choices(field.annotation) if isinstance(word, str)]
    near = nearest(value, words) if isinstance(value, str) else []
    hint = one_of(near) if near else ""
    return (
        f"{dotted(path)} must be {spell(field.annotation, field.metadata)}, not {show(value)}{hint}"
    )


def _meaning(kind: type[Section], key: str) -> str:
    return (kind.model_fields[key].description or "").rstrip(".")
