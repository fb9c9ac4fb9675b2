"""`load`: reads a config and checks it, or reports all its errors."""

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pipemega.config.build_sections import Builder
from pipemega.config.config import Config
from pipemega.config.run_sizes import size_rules
from pipemega.config.source import Invalid, Source, override, read
from pipemega.config.unknown_keys import probably_meant


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    adopt: bool = False,
) -> Config:
    """Load and check a config.

    Args:
        source: a path, a mapping, the text of a JSON object, or a Config.
        overrides: strings `a.b=value`; the value is JSON, or else text.
        adopt: move keys at the top level that are unlike every known key to `user`, with a warning;
            DeepSpeed ignores them, and scripts read them from its file.

    Raises:
        ConfigError: keys are unknown, missing, of the wrong type, refused, or contradict others;
            the message has a line for each of these errors.
    """
    if isinstance(source, Config) and not overrides:
        return source
    draft = examine(source, overrides, adopt=adopt)
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
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    world: int | None = None,
    *,
    adopt: bool = False,
) -> Draft:
    """Load a config as `load` does, and return it with its errors.

    Args:
        world: number of ranks of the run; None: that of the launcher, if there is one.
        adopt: as for `load`.

    Raises:
        ConfigError: the file does not exist or is not JSON, or an override is not KEY=VALUE.
    """
    given = source.to_dict() if isinstance(source, Config) else source
    found = override(read(given), overrides)
    found, adopted = _own_keys_in_user(found) if adopt else (found, ())
    builder = Builder((*found.errors, *_import(found.tree, _folders(source))))
    if len(builder.errors) > len(found.errors):
        return Draft(None, found, builder)  # the types of the modules are unknown
    config = builder.build(Config, found.tree)
    if config is not None:
        config.__dict__["auto_keys"] = tuple(builder.autos)
        config.__dict__["adopted_keys"] = adopted
        builder.apply(size_rules(builder.autos, world), config)
    if config is not None and not builder.errors:
        config = _with_tokenizer_of_model(config)
    if config is not None:
        # Not a key: it is no part of the config that is compared or saved.
        config.__dict__["name"] = _name(source)
    return Draft(config, found, builder)


def _own_keys_in_user(source: Source) -> tuple[Source, tuple[str, ...]]:
    """Move keys at the top level that are unlike every known key to `user`; return their names."""
    tree = source.tree
    user = tree.get("user", {}) if isinstance(tree, Mapping) else None
    if not isinstance(user, Mapping):
        return source, ()
    known = {*Config.model_fields, *Config.old_names}
    names = tuple(
        key
        for key in tree
        if key not in known and not probably_meant(Config, Config, key, tree, ())
    )
    if not names:
        return source, ()
    rest = {key: value for key, value in tree.items() if key not in names}
    own = {key: tree[key] for key in names}
    lines = {("user", *path) if path[0] in names else path: n for path, n in source.lines.items()}
    return replace(source, tree={**rest, "user": {**own, **user}}, lines=lines), names


def _with_tokenizer_of_model(config: Config) -> Config:
    """Set `data.tokenizer` to the tokenizer of the model if the data name none."""
    data, model = config.data, config.model
    if model is None or data.mock or data.tokenizer is not None:
        return config
    path = model.default_tokenizer()
    if path is None:
        return config
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer": path})})


def _folders(source: Any) -> list[Path]:
    """Return where the modules of `imports` may be: the current folder, that of the file."""
    is_file = not isinstance(source, Config | Mapping) and not str(source).lstrip().startswith("{")
    return [Path.cwd(), *([Path(source).absolute().parent] if is_file else [])]


def _import(tree: Any, folders: Iterable[Path]) -> Iterator[Invalid]:
    """Import the modules of the key `imports`, and yield an error for each that fails."""
    names = tree.get("imports", ()) if isinstance(tree, Mapping) else ()
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        return  # the check of the key reports it
    for folder in map(str, folders) if names else ():
        if folder not in sys.path:
            sys.path.insert(0, folder)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            example = Path(name).stem.lstrip(".") or "my_models"
            text = f"imports: {name!r} is not the name of a module: write {example!r} or the like"
            yield Invalid(("imports",), f"{text}; its folder may be in PYTHONPATH")
            continue
        try:
            import_module(name)
        # A script may end with sys.exit().
        except (Exception, SystemExit) as error:
            yield Invalid(("imports",), _import_error(name, error))


def _import_error(name: str, error: BaseException) -> str:
    """Return the text of the error, with the last line of the module's own code."""
    if isinstance(error, ModuleNotFoundError) and error.name == name.split(".")[0]:
        return (
            f"imports: there is no module {name!r} in the current folder, the folder of the config "
            f"or PYTHONPATH"
        )
    text = f"imports: the module {name!r} failed: {type(error).__name__}: {error}"
    # The first frame is the call of import_module; the text of a SyntaxError has file and line.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    others = ("importlib", "site-packages", f"{Path(__file__).parents[1]}{os.sep}")
    own = [f for f in frames if not any(other in f.filename for other in others)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else text


def _name(source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> str:
    if isinstance(source, Config):
        return source.name
    if isinstance(source, Mapping) or str(source).lstrip().startswith("{"):
        return "run"
    return Path(source).stem
