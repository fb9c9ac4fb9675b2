"""Build sections from plain values, and collect all errors.

Each error names the key, the problem and the alternative.

`load`: reads a config and checks it, or reports all its errors.

The command-line arguments of a training script: the config file, and changes of its keys.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipemega.config.config import Config, size_rules
from pipemega.config.declarations import (
    InvalidType,
    Rule,
    Section,
    as_integer,
    key_info,
    literal_values,
    section_type,
    type_text,
)
from pipemega.config.model_registry import JsonSection
from pipemega.config.name_suggestions import did_you_mean, nearest, suggestion
from pipemega.config.source import Invalid, KeyPath, Source, dotted, override, read, show
from pipemega.config.unknown_keys import probably_meant, unknown_key

S = TypeVar("S", bound=Section)


class Builder:
    """Builds sections and collects the errors of all of them.

    Args:
        found: errors of the keys that were found before.

    Attributes:
        errors: the errors in the order in which they were found.
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
        config: the config; if there are errors, with the valid keys only; None if the whole has no
            valid form.
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
        world: number of ranks of the run; None: the number that the launcher has set, if any.
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
    """Return where the modules of `imports` may be: the current folder, the folder of the file."""
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


def add_arguments(
    parser: argparse.ArgumentParser, config: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Add `--config`, `--set` and `--local-rank` to the parser of a script; return the parser.

        parser = pipemega.add_arguments(argparse.ArgumentParser())
        parser.add_argument("--epochs", type=int, default=2)
        args = parser.parse_args()
        config = pipemega.load_config(args.config, args.set)

    `--local-rank` is what torch.distributed.launch and DeepSpeed's launcher pass; it is ignored,
    because they also set LOCAL_RANK.

    Args:
        config: the value of `args.config` if there is no `--config`; without it, `--config` is
            required.
    """
    group = parser.add_argument_group("pipemega")
    group.add_argument(
        "--config",
        required=config is None,
        default=config,
        help="path of the config: JSON, JSON5 or Python (.py); see docs/config.md"
        + ("" if config is None else " (default: the config in the script)"),
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the config, as in --set mesh.pipeline=2 (repeatable)",
    )
    group.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="passed by some launchers; ignored, LOCAL_RANK is used",
    )
    return parser
