"""How a config key is declared: its meaning, and what pipemega does with it.

    own         supported; DeepSpeed does not have this key
    honoured    supported, with DeepSpeed's meaning
    ignored     accepted and has no effect; a warning gives the reason
    refused     only values that disable the feature are accepted; any other is an error with the
                reason and the alternative
    replaced    another form of a key, which the section's `prepare` replaces
    block       the section of an unsupported feature: ignored if disabled, refused if enabled

The checks, the JSON Schema and the reference pages are all made from these declarations.

Types of the values of config keys, and their descriptions for error messages and pages.

The DeepSpeed keys that have no counterpart in pipemega; `unsupported_keys.json` has the reasons.

A block (the section of a feature) is accepted with a warning if it is disabled, and refused if it
is enabled. Other keys are ignored with a warning, or refused.
"""

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from typing_extensions import Self


class Rule(NamedTuple):
    """A rule between keys of a section; it runs only if the keys that it reads are valid.

    Args:
        keys: the keys that it reads, relative to the section: "mesh.tensor" or a whole section;
            errors are reported at the first one that the config contains.
        check: takes the section; yields the text of each error, or raises ValueError.
    """

    keys: tuple[str, ...]
    check: Callable[[Any], Iterable[str]]


class InvalidType(ValueError):
    """The key `type` of a section is unknown or refused.

    Args:
        instead: the object with the type that is meant, to find the errors in its other keys; None
            if that is not known.
    """

    def __init__(self, message: str, instead: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.instead = instead


F = TypeVar("F", bound=Callable[[Any], Iterable[str]])


def rule(*keys: str) -> Callable[[F], F]:
    """Mark a method of a Section as the check of a `Rule` that reads `keys`."""

    def mark(method: F) -> F:
        method.__dict__["rule_keys"] = keys
        return method

    return mark


class Section(BaseModel):
    """One JSON object of the config: frozen, refuses unknown keys."""

    # defer_build: most sections of a config are not in its file, and need no validator.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )

    old_names: ClassVar[Mapping[str, str]] = {}
    """Old name of a key -> its present name."""

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # In a process that has not validated the class; pydantic 2.7 needs this for SerializeAsAny.
        type(self).model_rebuild()
        super().__setstate__(state)

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        """Convert other accepted forms of the object to the one that the fields describe.

        Raises:
            ValueError: the form is not accepted; its text is the error message.
        """
        return raw

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> "type[Section] | None":
        """Return the Section class of the object at `key`, None if it is not a Section."""
        return section_type(cls.model_fields[key].annotation)

    @classmethod
    def validated(cls, values: Mapping[str, Any]) -> Self:
        """Return the section with these values; sections below it are already built.

        Raises:
            ValidationError: some are not valid.
        """
        return cls.model_validate(values)

    @classmethod
    def rules(cls) -> Iterable[Rule]:
        """Return the rules between keys: the methods that are marked by `rule`."""
        for base in reversed(cls.__mro__):
            # A copy: a check can validate a section, which adds the validator to its class.
            for method in list(vars(base).values()):
                if keys := getattr(method, "rule_keys", None):
                    yield Rule(keys, method)

    def remarks(self) -> Iterable[str]:
        """Return warnings that follow from this section alone."""
        return ()


OF_USERS: Mapping[str, Any] = {"own": True, "status": "honoured"}
"""What pipemega does with a key of a user's pydantic model."""

# A class with a field named `type` cannot use the builtin `type` in its annotations.
SectionClass = type[Section]


def own(default: Any, text: str, **constraints: Any) -> Any:
    """Declare a supported key that DeepSpeed does not have."""
    return _field(default, text, {"own": True, "status": "honoured"}, constraints)


def honoured(default: Any, text: str, **constraints: Any) -> Any:
    """Declare a supported key with DeepSpeed's meaning."""
    return _field(default, text, {"status": "honoured"}, constraints)


def ignored(
    default: Any, text: str, why: str, agrees: Iterable[Any] = (), silent: Iterable[Any] = ()
) -> Any:
    """Declare a key without effect.

    Args:
        why: the reason, for the warning.
        agrees: values that describe what pipemega does anyway; they give no warning.
        silent: other values that give no warning.
    """
    agreeing = [None, *agrees, *([False] if default in (False, None) else [])]
    extra = {"status": "ignored", "why": why, "agrees": agreeing, "accepts": [*agreeing, *silent]}
    return _field(default, text, extra, {})


def refused(
    default: Any,
    text: str,
    why: str | Mapping[Any, str],
    *,
    accepts: Iterable[Any] = (),
    own: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a key of which only the default and the values in `accepts` are allowed.

    Args:
        why: the reason and the alternative; or a mapping from each refused value to its reason,
            if the other values of the type are supported.
    """
    extra: dict[str, Any] = {"status": "refused", "own": own, "accepts": [default, None, *accepts]}
    if isinstance(why, str):
        extra["why"] = why
    else:
        extra |= {"status": "honoured", "reasons": dict(why)}
    return _field(default, text, extra, constraints)


def replaced(text: str, instead: str) -> Any:
    """Declare another form of the key `instead`; `prepare` replaces it unless both are set."""
    return _field(False, text, {"status": "replaced", "instead": instead}, {})


def block(text: str, why: str, keys: str | None = None, on: str = "enabled") -> Any:
    """Declare the section of an unsupported DeepSpeed feature.

    Args:
        why: what to do instead.
        keys: the keys that the section may have, separated by spaces; None: any.
        on: what enables the feature: names of keys that must be false, null or 0; "any" content;
            or "nested", a true `enabled` at any depth.
    """
    names = None if keys is None else keys.split()
    extra = {"status": "block", "why": why, "keys": names, "on": on}
    return _field(None, text, extra, {})


def section(kind: type[Section], text: str, *, own: bool = False) -> Any:
    """Declare a nested section; all its keys have their defaults if it is not given."""
    return Field(
        default_factory=kind.model_construct,  # needs no validator
        description=text,
        json_schema_extra={"pipemega": {"status": "honoured", "own": own}},
    )


def _field(default: Any, text: str, extra: dict[str, Any], constraints: dict[str, Any]) -> Any:
    return Field(
        default, description=text, json_schema_extra={"pipemega": dict(extra)}, **constraints
    )


def key_info(field: FieldInfo) -> dict[str, Any]:
    """Return what `own`, `ignored` and the others stored with the field."""
    extra = field.json_schema_extra
    # A key of a user's model is declared by a pydantic field.
    found = extra.get("pipemega") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else dict(OF_USERS)


def section_type(annotation: Any) -> type[Section] | None:
    """Return the Section class in the annotation `Section` or `Section | None`, else None."""
    for kind in typing.get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def sections(root: Section) -> Iterator[tuple[tuple[str, ...], Section]]:
    """Yield (path, section) of `root` and of every section below it."""
    yield (), root
    for name in type(root).model_fields:
        value = getattr(root, name)
        if isinstance(value, Section):
            for path, below in sections(value):
                yield (name, *path), below


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


STAGE_3 = "this key belongs to ZeRO stage 3, which is not supported"

_TYPES: Mapping[str, Any] = {
    "any": Any,
    "bool": bool,
    "int": int,
    "text or null": str | None,
    "object or null": Mapping[str, Any] | None,
    "number of at least 0": NotNegative,
    "number of at least 0, or null": NotNegative | None,
    "positive int": Whole,
}
_KEYS = json.loads(Path(__file__).with_name("unsupported_keys.json").read_text(encoding="utf-8"))

STAGE_3_NAMES = {
    name.removeprefix("stage3_"): name
    for name in _KEYS["stage_3"]
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""DeepSpeed's second name of a key -> the name that its documentation uses."""


def _blocks(rows: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    return {name: (Mapping[str, Any] | bool | None, block(**row)) for name, row in rows.items()}


def _key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    default, texts = row["default"], (row["text"], row["why"])
    if row.get("status") == "refused":
        return _TYPES[row["type"]], refused(default, *texts)
    return _TYPES[row["type"]], ignored(default, *texts, silent=[default])


def _always_done(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return bool, ignored(row["default"], row["text"], "this is always done", agrees=[True])


def _of_stage_3(row: Mapping[str, Any]) -> tuple[Any, Any]:
    default = row["default"]
    return _TYPES[row["type"]], ignored(default, row["text"], STAGE_3, silent=[default])


if TYPE_CHECKING:
    UnsupportedExpertKeys = Section
    UnsupportedKeys = Section
    UnsupportedZeroKeys = Section
else:
    _new = partial(create_model, __base__=Section, __module__=__name__)
    UnsupportedKeys = _new(
        "UnsupportedKeys",
        **_blocks(_KEYS["blocks"]),
        **{name: _key(row) for name, row in _KEYS["keys"].items()},
    )
    UnsupportedExpertKeys = _new(
        "UnsupportedExpertKeys",
        **{name: _key(row) for name, row in _KEYS["expert_parallel"].items()},
    )
    UnsupportedZeroKeys = _new(
        "UnsupportedZeroKeys",
        **_blocks(_KEYS["zero_blocks"]),
        **{name: _key(row) for name, row in _KEYS["zero_keys"].items()},
        **{name: _always_done(row) for name, row in _KEYS["zero_always"].items()},
        **{name: _of_stage_3(row) for name, row in _KEYS["stage_3"].items()},
    )
