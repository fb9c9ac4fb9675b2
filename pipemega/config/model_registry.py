"""The types of `model`: a registry of sections, of pipemega and of users.

    @pipemega.register_model("my-vit")
    class MyViT(pydantic.BaseModel):
        depth: int

        def build(self, context: pipemega.ModelContext) -> pipemega.PipelineModule: ...

    {"imports": ["my_models"], "model": {"type": "my-vit", "depth": 12}}

The registry imports no torch. A section of pipemega itself names the module of a higher layer that
builds its model.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, create_model
from pydantic_core import to_json

from pipemega.config.declarations import Section, SectionClass, own
from pipemega.config.name_suggestions import nearest, suggestion
from pipemega.config.source import show
from pipemega.errors import ConfigError

# The type of a section without the key `type`.
DEFAULT_TYPE = "gpt"

M = TypeVar("M", bound=type[BaseModel])


class JsonSection(Section):
    """A section made of a user's pydantic model: its fields may have any type that JSON can fill.

    Objects below it are checked like sections, also if their classes are plain pydantic models.
    """

    @classmethod
    def section_at(cls, key: str, raw: Mapping[str, Any]) -> SectionClass | None:
        found = super().section_at(key, raw)
        annotation = cls.model_fields[key].annotation
        # In a list or dict the objects of the user's class are below the elements.
        is_union = get_origin(annotation) in (Union, UnionType)
        for kind in () if found else get_args(annotation) if is_union else (annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return _as_section(kind)
        return found

    @classmethod
    def validated(cls, values: Mapping[str, Any]) -> "JsonSection":
        # As JSON, because strict validation of Python values refuses the text of an enum or a path.
        return cls.model_validate_json(to_json(values))


@cache
def _as_section(kind: type[BaseModel]) -> type[JsonSection]:
    bases: Any = (kind, JsonSection)
    made: type[JsonSection] = create_model(
        kind.__name__, __base__=bases, __module__=kind.__module__
    )
    return made


class ModelSection(JsonSection):
    """The section `model`, whatever its type.

    A registered class overrides `build`, and the other methods where their defaults do not apply.
    """

    builder: ClassVar[str] = ""
    """Module of a higher layer with the functions that a type of pipemega delegates to."""

    type: str = own(DEFAULT_TYPE, "Type of the model.")

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if cls is not ModelSection:
            return raw
        known, given = ", ".join(_TYPES), raw["type"]
        if not isinstance(given, str):
            raise ValueError(f"model.type must be text, not {show(given)}; known: {known}")
        near = nearest(given, _TYPES)
        hint = f"{suggestion(near)} Known: {known}" if near else f"; known: {known}"
        raise ValueError(
            f"model.type {given!r} is not registered{hint}. For a type of yours, name the module "
            f"that registers it in the top-level key 'imports'"
        )

    def build(self, context: Any) -> Any:
        """Return the `PipelineModule` for a `pipemega.ModelContext`."""
        return self.above("build")(self, context)

    def sample(self, context: Any) -> tuple[Any, Any] | None:
        """Return (inputs, labels) of one micro-batch: of any device, only the shapes are used.

        None, the default, means token ids [micro-batch, sequence] for both.
        """
        return None

    def sample_tokens(self) -> int | None:
        """Return the tokens of one sample; None if samples are not tokens."""
        return getattr(self, "seq_length", None)

    def vocabulary(self) -> int | str | None:
        """Return the vocabulary size; "auto": the tokenizer's size; None: no vocabulary."""
        return getattr(self, "vocab_size", None)

    def number_of_classes(self) -> int | None:
        """Return the number of classes of a model of images; None: it does not tell."""
        return getattr(self, "num_classes", None)

    def layer_count(self) -> int | None:
        """Return the number of pipeline layers; None if only `build` can tell it."""
        return None

    def flops_per_token(self, context: Any) -> float | None:
        """Return the FLOPs of forward and backward per token; None: count them."""
        return None

    def default_tokenizer(self) -> str | None:
        """Return the tokenizer that belongs to the model, for data without one; None if none."""
        return None

    def input_files(self) -> Iterable[tuple[str, str, str]]:
        """Return (key, path, error or "") of each file or folder that the section names."""
        return ()

    def computed_values(self) -> Iterable[tuple[str, str, str]]:
        """Return (key, value, where it is from) of each key that the config leaves open."""
        return ()

    def above(self, function: str) -> Callable[..., Any]:
        """Return a function of the module `builder`, which is imported now."""
        found: Callable[..., Any] = getattr(importlib.import_module(self.builder), function)
        return found


_TYPES: dict[str, type[ModelSection]] = {}


def register_model(name: str) -> Callable[[M], M]:
    """Register a pydantic model as the section `model` with `"type": name`.

        @pipemega.register_model("my-vit")
        class MyViT(pydantic.BaseModel):
            depth: int = Field(12, gt=0, description="Number of blocks.")

            def build(self, context: ModelContext) -> PipelineModule: ...

    The keys are checked like pipemega's own keys: unknown keys, missing keys and wrong types are
    errors, and values are not converted. Name the class's module in the top-level key `imports`.
    The class may also define the other methods of `ModelSection`.

    Raises:
        ConfigError: the name is registered already, or the class has no `build` or is not a
            pydantic model.
    """

    def register(kind: M) -> M:
        _check_class(name, kind)
        made: Any = kind if _declares_type(kind, name) else _with_type(kind, name)
        present = _TYPES.get(name)
        if present is not None and _origin(present) != _origin(made):
            raise ConfigError(
                f"register_model({name!r}): the name belongs to {_shown(present)}, and "
                f"{_shown(made)} cannot have it too: choose another name"
            )
        _TYPES[name] = made
        return made  # type: ignore[no-any-return]

    return register


def _declares_type(kind: type[BaseModel], name: str) -> bool:
    """Return whether the class is a section with the key `type`, like pipemega's sections."""
    is_section = issubclass(kind, ModelSection)
    return is_section and get_args(kind.model_fields["type"].annotation) == (name,)


def _with_type(kind: type[BaseModel], name: str) -> Any:
    """Return a subclass that is a section with the key `type`."""
    bases: Any = (kind,) if issubclass(kind, ModelSection) else (kind, ModelSection)
    word: Any = Literal[name]
    made: Any = create_model(
        kind.__name__,
        __base__=bases,
        __module__=kind.__module__,
        __doc__=kind.__doc__,
        type=(word, own(name, "Type of the model.")),
    )
    made.__qualname__ = kind.__qualname__
    # Now, so that a key of a type that pydantic does not know is an error of the user's module.
    made.model_rebuild(raise_errors=False)
    return made


def _check_class(name: Any, kind: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"register_model() takes the name of a model type, such as "
            f'@register_model("my-vit"), not {name!r}'
        )
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise ConfigError(
            f"register_model({name!r}) must decorate a class derived from pydantic.BaseModel, "
            f"whose fields are the keys of the section, not {kind!r}"
        )
    if not callable(getattr(kind, "build", None)):
        raise ConfigError(
            f"register_model({name!r}): the class {kind.__name__} has no method "
            f"build(self, context), which returns the PipelineModule"
        )
    for key in kind.model_fields:
        if key in vars(ModelSection) and key != "type":
            raise ConfigError(
                f"register_model({name!r}): the key {key!r} of {kind.__name__} has the name of a "
                f"method of model sections: give it another name"
            )


def _origin(kind: type) -> tuple[str, str]:
    """Return the file and the name of a class: the same if its module is imported again."""
    try:
        return inspect.getfile(kind), kind.__qualname__
    except (OSError, TypeError):  # defined in an interactive session
        return kind.__module__, kind.__qualname__


def _shown(kind: type) -> str:
    file, name = _origin(kind)
    return f"{name} ({file})"


def model_types() -> Mapping[str, type[ModelSection]]:
    """Return name -> section of the registered types."""
    return _TYPES


def section_of_type(raw: Any) -> type[ModelSection]:
    """Return the section for the object `model` of a config; `ModelSection` refuses the others."""
    given = raw.get("type", DEFAULT_TYPE) if isinstance(raw, Mapping) else DEFAULT_TYPE
    return _TYPES.get(given, ModelSection) if isinstance(given, str) else ModelSection
