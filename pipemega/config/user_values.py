"""The section `user`: values of the script, as keys and as attributes."""

from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pipemega.config.name_suggestions import did_you_mean


class UserValues(dict[str, Any]):
    """A JSON object, read as `config.user.lr` or `config.user["lr"]`.

    Objects in it can be read in the same way: `config.user.mixup.alpha`. A key that is also the
    name of a method of dict, such as `items`, needs brackets.

    Raises:
        AttributeError: there is no such key; the message names the nearest one.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: _wrapped(value) for key, value in (values or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"config.user has no key {name!r}{did_you_mean(name, self)}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the config is frozen: set user.{name} in its file, or by --set")

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, handler(Mapping[str, Any]))


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return UserValues(value)
    return tuple(map(_wrapped, value)) if isinstance(value, list | tuple) else value
