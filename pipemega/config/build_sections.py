"""Build sections from plain values, and collect all errors.

Each error names the key, the problem and the alternative.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipemega.config.key_kinds import InvalidType, Rule, Section, key_info, section_type
from pipemega.config.model_registry import JsonSection
from pipemega.config.name_suggestions import did_you_mean, nearest, suggestion
from pipemega.config.source import Invalid, KeyPath, dotted, show
from pipemega.config.unknown_keys import unknown_key
from pipemega.config.value_types import as_integer, literal_values, type_text

S = TypeVar("S", bound=Section)


class Builder:
    """Builds sections and collects the errors of all of them.

    Args:
        found: errors of the keys that were found before.

    Attributes:
        errors: in the order in which they were found.
        autos: the keys that are "auto" and have their default therefore.
    """

    def __init__(self, found: Iterable[Invalid] = ()) -> None:
        self.errors = list(found)
        self.autos: list[KeyPath] = []
        self._bad: set[KeyPath] = {error.path for error in self.errors}
        self._root: type[Section] | None = None

    def build(self, kind: type[S], raw: Any, path: KeyPath = ()) -> S | None:
        """Build a section of type `kind`, and before it the sections that it contains.

        Returns:
            the section; if it has errors, an incomplete one with its valid keys, for the rules of
            other sections; None if its form is not known.
        """
        self._root = self._root or kind
        try:
            raw = kind.prepare(raw)
        except InvalidType as error:
            self._report(Invalid((*path, "type"), str(error)))
            if error.instead is not None:
                # For the errors in its other keys.
                self.build(kind, error.instead, path)
            return None
        except ValueError as error:
            self._report(Invalid(path, str(error)))
            return None
        if not isinstance(raw, Mapping):
            self._report(Invalid(path, f"{dotted(path)} must be an object, not {show(raw)}"))
            return None
        raw = self._renamed(kind, raw, path)
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in kind.model_fields:
                unknown, meant = unknown_key(self._root, kind, key, raw, path)
                self._report(unknown)
                self._bad.update(meant)
            elif _is_auto(kind.model_fields[key], value):
                self.autos.append((*path, key))
            else:
                values |= self._value(kind, key, raw, path)
        section = self._validated(kind, values, path)
        self.apply(kind.rules(), section, path)
        return section

    def apply(self, rules: Iterable[Rule], section: Section, path: KeyPath = ()) -> None:
        """Check rules of the section at `path`, except those that read keys with errors."""
        for keys, check in rules:
            paths = [(*path, *key.split(".")) for key in keys]
            if self._have_errors(paths):
                continue
            for message in _messages(check, section):
                self._report(Invalid(paths[0], message, tuple(paths[1:])))

    def _have_errors(self, paths: Iterable[KeyPath]) -> bool:
        """Return whether one of these keys, or a key above or below it, has an error."""
        return any(
            bad[: len(path)] == path or path[: len(bad)] == bad
            for bad in self._bad
            for path in paths
        )

    def _report(self, error: Invalid) -> None:
        self.errors.append(error)
        self._bad.add(error.path)

    def _renamed(
        self, kind: type[Section], raw: Mapping[str, Any], path: KeyPath
    ) -> Mapping[str, Any]:
        """Replace old names of keys by the present ones."""
        for old, new in kind.old_names.items():
            if old in raw and new in raw:
                names = dotted((*path, old)), dotted((*path, new))
                message = f"{names[0]} is another name of {names[1]}, and both are set: keep one"
                self._report(Invalid((*path, old), message))
        return {kind.old_names.get(key, key): value for key, value in raw.items()}

    def _value(
        self, kind: type[Section], key: str, raw: Mapping[str, Any], path: KeyPath
    ) -> dict[str, Any]:
        """Return {key: checked value}, built if it is a section; {} if it is not valid."""
        field, here = kind.model_fields[key], (*path, key)
        value = as_integer(field.annotation, raw[key])
        if here in self._bad and not isinstance(value, Mapping):
            return {}
        if errors := list(_status_errors(field, value, here)):
            for error in errors:
                self._report(error)
            return {}
        below = kind.section_at(key, raw)
        if below is None or isinstance(value, Section):
            return {key: value}
        if not isinstance(value, Mapping) and _has_other_forms(field, value):
            return {key: value}
        built = self.build(below, value, here)
        return {} if built is None else {key: built}

    def _validated(self, kind: type[S], values: dict[str, Any], path: KeyPath) -> S:
        try:
            return kind.validated(values)
        except ValidationError as error:
            errors = _explained(kind, error, values, path)
        for found in errors:
            # A required key that is missing because it is misspelled is reported once.
            if found.path not in self._bad:
                self._report(found)
        bad = {found.path[-1] for found in errors}
        return kind.model_construct(**{k: v for k, v in values.items() if k not in bad})


def _messages(check: Callable[[Any], Iterable[str]], section: Section) -> Iterator[str]:
    try:
        yield from check(section)
    except ValueError as error:
        yield from getattr(error, "problems", ()) or (str(error),)


def _is_auto(field: FieldInfo, value: Any) -> bool:
    """Return whether `value` is "auto" and means the default, as for any DeepSpeed key."""
    takes_it = key_info(field).get("own") or "auto" in literal_values(field.annotation)
    return value == "auto" and not takes_it and not field.is_required()


def _has_other_forms(field: FieldInfo, value: Any) -> bool:
    """Return whether the key also accepts `value`, which is not an object."""
    kinds = [kind for kind in get_args(field.annotation) if section_type(kind) is None]
    return any((kind is type(None)) is (value is None) for kind in kinds)


def _status_errors(field: FieldInfo, value: Any, path: KeyPath) -> Iterator[Invalid]:
    """Yield the errors of an unsupported value, with the reason declared at the field."""
    found = key_info(field)
    if found["status"] == "block":
        yield from _block_errors(found, value, path)
    elif found["status"] == "refused" and not _among(value, found["accepts"]):
        yield Invalid(path, f"{dotted(path)} cannot be {show(value)}: {found['why']}")
    elif found["status"] == "replaced" and isinstance(value, bool):
        yield Invalid(
            path,
            f"{dotted(path)} is the old form of {found['instead']}, and the two contradict each "
            "other: keep one",
        )
    for refused, why in found.get("reasons", {}).items():
        if _among(value, [refused]):
            yield Invalid(path, f"{dotted(path)} cannot be {show(value)}: {why}")


def _among(value: Any, values: Any) -> bool:
    # In Python True == 1 and False == 0; in a config they are different values.
    return any(value == other and isinstance(value, bool) is isinstance(other, bool)
               for other in values)  # fmt: skip


def _block_errors(found: Mapping[str, Any], value: Any, path: KeyPath) -> Iterator[Invalid]:
    if value is None or value is False:
        return
    if not isinstance(value, Mapping):
        yield Invalid(path, f"{dotted(path)} cannot be {show(value)}: {found['why']}")
        return
    for key in value:
        if found["keys"] is not None and key not in found["keys"]:
            hint = did_you_mean(key, found["keys"])
            yield Invalid((*path, key), f"unknown key '{dotted((*path, key))}'{hint}")
    if enabling := [(*path, *key) for key in _switched_on(value, found["on"])]:
        names = ", ".join(map(dotted, enabling))
        are = "are" if len(enabling) > 1 else "is"
        text = f"{names} {are} enabled, but not supported: {found['why']}"
        yield Invalid(enabling[0], text, tuple(enabling[1:]))


def _switched_on(value: Mapping[str, Any], on: str) -> Iterator[KeyPath]:
    """Yield the paths of the keys that enable an unsupported block."""
    if on == "any":
        yield from [()] if value else []
        return
    for key in ["enabled"] if on == "nested" else on.split():
        if not _among(value.get(key), (None, "auto", False, 0)):
            yield (key,)
    if on == "nested":
        for name, below in value.items():
            if isinstance(below, Mapping):
                yield from ((name, *path) for path in _switched_on(below, on))


def _explained(
    kind: type[Section], error: ValidationError, values: Mapping[str, Any], path: KeyPath
) -> list[Invalid]:
    """Convert pydantic's errors, one for each key."""
    found: dict[str, Invalid] = {}
    for detail in error.errors(include_url=False):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        where = (*path, key) if key else path
        if key in found:  # pydantic reports each member of a union separately
            continue
        if detail["type"] == "missing" and len(detail["loc"]) == 1:
            message = f"{dotted(where)} is missing, and has no default{_meaning(kind, key)}"
        elif detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
            # A validator of a user's model need not know where the model is in the config.
            if dotted(where) not in message and issubclass(kind, JsonSection):
                message = f"{dotted(where)}: {message}"
        elif key in kind.model_fields:
            message = _wrong(kind.model_fields[key], values[key], where)
        else:
            message = f"{dotted(where)}: {detail['msg']}"
        found[key] = Invalid(where, message)
    return list(found.values())


def _wrong(field: FieldInfo, value: Any, path: KeyPath) -> str:
    known = dict.fromkeys(literal_values(field.annotation))
    words = [word for word in known if isinstance(word, str)]
    near = nearest(value, words) if isinstance(value, str) else []
    hint = suggestion(near) if near else ""
    expected = type_text(field.annotation, field.metadata)
    return f"{dotted(path)} must be {expected}, not {show(value)}{hint}"


def _meaning(kind: type[Section], key: str) -> str:
    text = kind.model_fields[key].description
    return f": {text.rstrip('.')}" if text else ""
