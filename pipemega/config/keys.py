"""What a key of the config is: a field with a meaning, and what we do with it.  Floor 1.

    own, honoured   the run does what it says; `own` is a key that DeepSpeed does not have
    ignored         accepted, and a warning says what is not done and why
    refused         only values that switch the thing off are accepted; any other is an error
                    that says why, and the way out

These four, and `block` for whole sections of features that are not here, are the one table from
which the checks, the JSON Schema and the reference pages are made.
"""

import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Up to 1 without 1: a probability of dropping, the memory of a running average.
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """One object of the config file: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    old_names: ClassVar[Mapping[str, str]] = {}
    """Keys under the names that they had before."""

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        """Other spellings -> the one that the fields have; raises ValueError with the message."""
        return raw

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> "type[Section] | None":
        """The class of the object below `key`, if that is one of ours."""
        return section_in(cls.model_fields[key].annotation)

    def remarks(self) -> Iterable[str]:
        """Warnings that this section alone gives rise to."""
        return ()


# A field may be called `type`, and hides the word in the rest of its class.
SectionClass = type[Section]


def own(default: Any, text: str, **constraints: Any) -> Any:
    """A key of ours."""
    return _field(default, text, {"own": True, "status": "honoured"}, constraints)


def honoured(default: Any, text: str, **constraints: Any) -> Any:
    """A key of DeepSpeed's that does here what it does there."""
    return _field(default, text, {"status": "honoured"}, constraints)


def ignored(default: Any, text: str, why: str, agrees: Iterable[Any] = ()) -> Any:
    """A key that changes nothing; silent only where its value says what is done anyway."""
    silent = [None, *agrees, *([False] if default in (False, None) else [])]
    return _field(default, text, {"status": "ignored", "why": why, "accepts": silent}, {})


def refused(
    default: Any,
    text: str,
    why: str | Mapping[Any, str],
    *,
    accepts: Iterable[Any] = (),
    own: bool = False,
    **constraints: Any,
) -> Any:
    """A key that must stay off: at its default, or at a value in `accepts`.

    Args:
        why: the reason and the way out; or one for each value that is refused, where the values
            of the type are otherwise honoured.
    """
    extra: dict[str, Any] = {"status": "refused", "own": own, "accepts": [default, None, *accepts]}
    if isinstance(why, str):
        extra["why"] = why
    else:
        extra |= {"status": "honoured", "reasons": dict(why)}
    return _field(default, text, extra, constraints)


def block(text: str, why: str, keys: str | None = None, on: str = "enabled") -> Any:
    """A section of DeepSpeed's for something that is not here.

    Args:
        why: what to do instead.
        keys: the keys of that section; None: any.
        on: what switches it on: the keys that must be false, null or 0, or "any" content, or
            "nested": a true `enabled` at any depth.
    """
    names = None if keys is None else keys.split()
    extra = {"status": "block", "why": why, "keys": names, "on": on}
    return _field(None, text, extra, {})


def section(kind: type[Section], text: str, *, own: bool = False) -> Any:
    """A section below this one, all defaults when it is not written."""
    return Field(
        default_factory=kind,
        description=text,
        json_schema_extra={"pipemega": {"status": "honoured", "own": own}},
    )


def _field(default: Any, text: str, extra: dict[str, Any], constraints: dict[str, Any]) -> Any:
    return Field(
        default, description=text, json_schema_extra={"pipemega": dict(extra)}, **constraints
    )


def marks(field: FieldInfo) -> dict[str, Any]:
    """What `own`, `ignored` and the others wrote beside the field."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "every key is made by a function of this file"
    found = extra["pipemega"]
    assert isinstance(found, dict)
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """The Section in `Section`, or in `Section | None`."""
    for kind in typing.get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def sections(root: Section) -> Iterator[tuple[tuple[str, ...], Section]]:
    """`root` and every section below it, with its path."""
    yield (), root
    for name in type(root).model_fields:
        value = getattr(root, name)
        if isinstance(value, Section):
            for path, below in sections(value):
                yield (name, *path), below


def choices(annotation: Any) -> list[Any]:
    """The words that a value may be, where the type lists them."""
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [word for part in typing.get_args(annotation) for word in choices(part)]


def spell(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """A type in words: `Count | Literal["auto"]` -> `an integer >= 1 or "auto"`."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = [m for extra in parts[1:] for m in getattr(extra, "metadata", [])]
        return spell(parts[0], inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(spell(part, constraints) for part in parts))
    if origin is Literal:
        return " or ".join(json.dumps(word) for word in parts)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"a list of ({spell(parts[0])})"
        return f"[{', '.join(spell(part) for part in parts)}]"
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    words |= {type(None): "null", Any: "anything"}
    return words.get(annotation, "an object") + _bounds(annotation, constraints)


def _bounds(kind: Any, constraints: Iterable[Any]) -> str:
    if kind not in (int, float):
        return ""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(constraint, name):g}"
        for name, sign in signs.items()
        for constraint in constraints
        if hasattr(constraint, name)
    ]
    return (" " + " and ".join(found)) if found else ""
