"""`load`: reads a config and checks it, or reports all its errors."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipemega.config.build_sections import Builder
from pipemega.config.config import Config
from pipemega.config.source import Invalid, Source, override, read


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Config:
    """Load and check a config.

    Args:
        source: a path, a mapping, the text of a JSON object, or a Config.
        overrides: strings `a.b=value`; the value is JSON, or else text.

    Raises:
        ConfigError: keys are unknown, missing, of the wrong type, refused, or contradict others;
            the message has a line for each of these errors.
    """
    if isinstance(source, Config) and not overrides:
        return source
    draft = examine(source, overrides)
    if draft.errors:
        raise draft.source.error(draft.errors)
    assert draft.config is not None, "a draft without a config has errors"
    return draft.config


class Draft(NamedTuple):
    """A config that may have errors.

    Args:
        config: if there are errors, with the valid keys only; None if the whole has no valid form.
        source: the values as written, and the lines of the keys.
        builder: has the errors, and which keys they concern.
    """

    config: Config | None
    source: Source
    builder: Builder

    @property
    def errors(self) -> list[Invalid]:
        return self.builder.errors


def examine(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Draft:
    """Load a config as `load` does, and return it with its errors.

    Raises:
        ConfigError: the file does not exist or is not JSON, or an override is not KEY=VALUE.
    """
    given = source.to_dict() if isinstance(source, Config) else source
    found = override(read(given), overrides)
    builder = Builder(found.errors)
    config = builder.build(Config, found.tree)
    if config is not None:
        # Not a key: it is no part of the config that is compared or saved.
        config.__dict__["name"] = _name(source)
    return Draft(config, found, builder)


def _name(source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> str:
    if isinstance(source, Config):
        return source.name
    if isinstance(source, Mapping) or str(source).lstrip().startswith("{"):
        return "run"
    return Path(source).stem
