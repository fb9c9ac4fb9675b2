"""Groups of parameters that are chosen by name: `optimizer.groups`, and initialize's argument.

[{"params": "norm|bias", "weight_decay": 0.0}, {"params": "^0\\.", "lr": 1e-5}]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipemega.config.key_kinds import Section
from pipemega.config.name_suggestions import did_you_mean
from pipemega.config.source import show
from pipemega.config.value_types import type_text

_EXAMPLE = 'such as {"params": "norm|bias", "weight_decay": 0.0}'


class GroupSpec(NamedTuple):
    """One group.

    Args:
        key: of the group, for messages: "optimizer.groups[0]".
        pattern: a regular expression; `re.search` finds it in the logical names of its parameters.
        options: of the optimizer, for these parameters.
    """

    key: str
    pattern: str
    options: Mapping[str, Any]


def read_groups(groups: Any, name: str) -> tuple[GroupSpec, ...]:
    """Return the groups, without a check of their options.

    Args:
        name: of the key or the argument, for messages.

    Raises:
        ValueError: the form is not that of groups, or a regular expression is invalid.
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise ValueError(f"{name} must be a list of groups {_EXAMPLE}, not {_shown(groups)}")
    return tuple(_read_group(group, f"{name}[{i}]") for i, group in enumerate(groups))


def _read_group(group: Any, key: str) -> GroupSpec:
    if not isinstance(group, Mapping):
        raise ValueError(f"{key} must be a group {_EXAMPLE}, not {_shown(group)}")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
    pattern = options.pop("params", None)
    if not isinstance(pattern, str):
        found = "is missing" if pattern is None else f"must be text, not {_shown(pattern)}"
        raise ValueError(
            f"{key}.params {found}: it is a regular expression for the logical names of the "
            f"group's parameters, {_EXAMPLE}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{key}.params {pattern!r} is not a regular expression: {error}"
        ) from error
    return GroupSpec(key, pattern, options)


def option_errors(spec: GroupSpec, params: type[Section], names: Sequence[str]) -> Iterator[str]:
    """Yield the errors in the options of a group of an optimizer of the config.

    Args:
        params: the section that describes the options.
        names: those that may differ between groups.
    """
    for name, value in spec.options.items():
        if name not in names:
            yield f"{spec.key} has the unknown option {name!r}{did_you_mean(name, names)}"
            continue
        try:
            params.model_validate({name: value})
        except ValidationError:
            field = params.model_fields[name]
            expected = type_text(field.annotation, field.metadata)
            yield f"{spec.key}.{name} must be {expected}, not {_shown(value)}"


def _shown(value: Any) -> str:
    plain = isinstance(value, str | int | float | tuple | list | dict | None)
    return show(value) if plain else f"a {type(value).__name__}"
