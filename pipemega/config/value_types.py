"""Types of the values of config keys, and their descriptions for error messages and pages."""

import json
import types
import typing
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Excludes 1: a dropout probability, the decay rate of a running average.
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]


def literal_values(annotation: Any) -> list[Any]:
    """Return the values in the `Literal`s of an annotation."""
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [word for part in typing.get_args(annotation) for word in literal_values(part)]


def as_integer(annotation: Any, value: Any) -> Any:
    """Return a number such as 1e5 as an int if the type accepts integers, but no other numbers."""
    if isinstance(value, float) and value.is_integer():
        kinds = set(_plain_types(annotation))
        return int(value) if int in kinds and float not in kinds else value
    return value


def _plain_types(annotation: Any) -> Iterator[Any]:
    """Yield the types that are the annotation, or members of its union."""
    if typing.get_origin(annotation) is Annotated:
        yield from _plain_types(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _plain_types(part)
    else:
        yield annotation


def type_text(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """Return a type as text: `Count | Literal["auto"]` -> `an integer >= 1 or "auto"`."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = [m for extra in parts[1:] for m in getattr(extra, "metadata", [])]
        return type_text(parts[0], inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(part, constraints) for part in parts))
    if origin is Literal:
        return " or ".join(json.dumps(word) for word in parts)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"a list of ({type_text(parts[0])})"
        return f"[{', '.join(type_text(part) for part in parts)}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(json.dumps(member.value) for member in annotation)
    words = {int: "an integer", float: "a number", str: "text", Path: "text", bool: "true or false"}
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
