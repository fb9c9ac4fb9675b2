"""docs/config.md and docs/deepspeed.md, generated from the declarations of the keys.

JSON Schema of the config, for completion and checks in an editor.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from pydantic.fields import FieldInfo

from pipemega.config.config import MODEL_TYPES, Config
from pipemega.config.declarations import (
    OF_USERS,
    STAGE_3_NAMES,
    Section,
    key_info,
    section_type,
    type_text,
)
from pipemega.config.model_registry import DEFAULT_TYPE, ModelSection, model_types
from pipemega.config.sections import optimizer_section, scheduler_section
from pipemega.config.source import KeyPath, dotted

_TABLE_HEAD = "key | type | default | meaning"
# Replaced by the table of all keys below these prefixes, unless another line has a longer prefix.
_KEYS_LINE = re.compile(r"^\{\{keys (.*)\}\}$", re.MULTILINE)


def reference_page() -> str:
    """Return docs/config.md: every supported key, by topic."""
    template = _template("config_page.md")
    topics = _KEYS_LINE.findall(template)
    return _KEYS_LINE.sub(lambda found: _topic_tables(found[1], topics), template)


def deepspeed_page() -> str:
    """Return docs/deepspeed.md: every DeepSpeed key, by section."""
    parts = [_template("deepspeed_page.md")]
    for title, _, kind in all_sections():
        rows = [
            _deepspeed_row(name, field)
            for name, field in kind.model_fields.items()
            if not key_info(field).get("own") and section_type(field.annotation) is None
        ]
        if rows:
            parts.append(f"## {title}\n\n{_table('key | support | default | meaning', rows)}\n")
    rows = [
        f"| {name} | {_sentence(why)} |" for name, (why, _) in optimizer_section.REFUSED.items()
    ]
    table = _table("`optimizer.type` | reason and alternative", rows)
    return "\n".join((*parts, f"## Refused optimizers\n\n{table}\n"))


def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def all_sections() -> Iterator[tuple[str, KeyPath, type[Section]]]:
    """Yield (title, path, class) of every section; `params` once for each class."""
    yield "Top level", (), Config
    yield from _sections_below(Config, ())


def _sections_below(
    kind: type[Section], path: KeyPath
) -> Iterator[tuple[str, KeyPath, type[Section]]]:
    for name, field in kind.model_fields.items():
        below, here = section_type(field.annotation), (*path, name)
        if below in (optimizer_section.OptimizerParams, scheduler_section.SchedulerParams):
            table = optimizer_section.PARAMS if path == ("optimizer",) else scheduler_section.PARAMS
            for params in dict.fromkeys(map(_with_keys, table.values())):
                types = ", ".join(w for w, other in table.items() if _with_keys(other) is params)
                yield f"`{dotted(here)}` of {types}", here, params
        elif below is ModelSection:
            for model in MODEL_TYPES:
                word = model.model_fields["type"].default
                yield f"`{dotted(here)}` of type {word}", here, model
        elif below is not None:
            yield f"`{dotted(here)}`", here, below
            yield from _sections_below(below, here)


def _with_keys(kind: type[Section]) -> type[Section]:
    """Return the class that declares the keys of `kind`, which may have another formula only."""
    return next(c for c in kind.__mro__ if inspect.get_annotations(c))


def _topic_tables(topic: str, topics: Sequence[str]) -> str:
    """Return the table of the keys of one topic, and a table for each of its `params` classes.

    Args:
        topic: prefixes of its keys, separated by spaces.
        topics: all topics of the page.
    """
    rows, params = [], []
    for title, path, kind in all_sections():
        supported = {name: field for name, field in kind.model_fields.items() if _supported(field)}
        if path[-1:] == ("params",) or kind in MODEL_TYPES[1:]:
            if _topic_of(path, topics) == topic:
                prefix = "" if path[-1:] == ("params",) else f"{dotted(path)}."
                supported.pop("type", None)  # it has a row already
                own_rows = [_reference_row(prefix + name, f) for name, f in supported.items()]
                params.append(f"### {title}\n\n{_table(_TABLE_HEAD, own_rows)}")
            continue
        rows += [
            _reference_row(dotted((*path, name)), field)
            for name, field in supported.items()
            # A section that always exists gets no row, because each of its keys has one.
            if field.default_factory is None and _topic_of((*path, name), topics) == topic
        ]
    return "\n\n".join((_table(_TABLE_HEAD, rows), *params))


def _topic_of(path: KeyPath, topics: Sequence[str]) -> str | None:
    """Return the topic with the longest prefix of `path`."""
    prefixes = [dotted(path[:length]) for length in range(len(path), 0, -1)]
    found = (topic for prefix in prefixes for topic in topics if prefix in topic.split())
    return next(found, None)


def _supported(field: FieldInfo) -> bool:
    return bool(key_info(field)["status"] == "honoured" or key_info(field).get("own"))


def _table(head: str, rows: Iterable[str]) -> str:
    ruler = " | ".join("---" for _ in head.split(" | "))
    return "\n".join((f"| {head} |", f"| {ruler} |", *rows))


def _reference_row(name: str, field: FieldInfo) -> str:
    kind = type_text(field.annotation, field.metadata)
    why = key_info(field).get("why")
    text = f"{field.description} *{_sentence(why)}*" if why else field.description
    return _row(name, kind, _default(field), text or "")


def _deepspeed_row(name: str, field: FieldInfo) -> str:
    found = key_info(field)
    status = {"block": "refused if enabled, else ignored"}.get(found["status"], found["status"])
    reasons = {why: None for why in [found.get("why"), *found.get("reasons", {}).values()] if why}
    text = " ".join([field.description or "", *(f"*{_sentence(why)}*" for why in reasons)])
    if found.get("reasons"):
        status = f"honoured; refused: {', '.join(map(str, found['reasons']))}"
    return _row(name, status, _default(field), text)


def _sentence(text: str) -> str:
    """Return `text` as a sentence; a key at its start keeps its small letter."""
    first = text.split()[0]
    start = text[0] if "_" in first or "." in first else text[0].upper()
    return f"{start}{text[1:].rstrip('.')}."


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{json.dumps(field.default)}`"


def _row(*cells: str) -> str:
    first, *rest = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| `{first}` | {' | '.join(rest)} |"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file."""
    found = Config.model_json_schema()
    for kind in (found, *found.get("$defs", {}).values()):
        _adapt_object(kind)
    _add_model_types(found["$defs"])
    definitions = found["$defs"]
    for part, names in ((found, Config.old_names), (definitions["ZeroSection"], STAGE_3_NAMES)):
        part["properties"] |= {old: part["properties"][new] for old, new in names.items()}
    _add_params_by_type(definitions, "OptimizerSection", optimizer_section.PARAMS)
    definitions["OptimizerSection"]["required"] = ["type"]
    _add_params_by_type(definitions, "SchedulerSection", scheduler_section.PARAMS)
    definitions["SchedulerSection"]["anyOf"] = [{"required": ["type"]}, {"required": ["by"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _add_model_types(definitions: dict[str, Any]) -> None:
    """Make the allowed keys of `model` depend on its `type`; add the registered types."""
    cases = []
    for word, kind in model_types().items():
        definition = kind.model_json_schema(ref_template="#/$defs/{model}")
        nested = definition.pop("$defs", {})
        for part in (definition, *nested.values()):
            if "properties" in part:
                _adapt_object(part)
                part["additionalProperties"] = False
        definitions.update({**nested, f"model.{word}": definition})
        required = [] if word == DEFAULT_TYPE else ["type"]
        condition = {"properties": {"type": {"const": word}}, "required": required}
        cases.append({"if": condition, "then": {"$ref": f"#/$defs/model.{word}"}})
    definitions["ModelSection"] = {
        "type": "object",
        "properties": {"type": {"enum": list(model_types())}},
        "allOf": cases,
    }


def _adapt_object(kind: dict[str, Any]) -> None:
    """Allow comment keys in one object, and adapt its properties."""
    kind["patternProperties"] = {"^_": {}}
    kind["properties"] = {k: _adapt_property(v) for k, v in kind["properties"].items()}


def _adapt_property(value: dict[str, Any]) -> dict[str, Any]:
    """Add the reason to the description, mark unsupported keys as deprecated, allow "auto"."""
    found = value.pop("pipemega", OF_USERS)
    if why := found.get("why"):
        value["description"] = f"{value.get('description', '')} {found['status']}: {why}"
    if found.get("status") in ("ignored", "refused", "replaced", "block"):
        value["deprecated"] = True
    if found.get("own") or "auto" in json.dumps(value.get("anyOf", "")):
        return value
    words = ("description", "default", "title", "deprecated")
    texts: dict[str, Any] = {word: value.pop(word) for word in words if word in value}
    return {**texts, "anyOf": [value, {"const": "auto"}]}


def _add_params_by_type(
    definitions: dict[str, Any], name: str, table: Mapping[str, type[Section]]
) -> None:
    """Make the allowed keys of `params` depend on `type`."""
    cases = []
    for word, kind in ((word, _with_keys(kind)) for word, kind in table.items()):
        part = kind.model_json_schema()
        _adapt_object(part)
        definitions[kind.__name__] = part
        cases.append(
            {
                "if": {"properties": {"type": {"const": word}}},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{kind.__name__}"}}},
            }
        )
    definitions[name]["allOf"] = cases
    definitions[name]["properties"]["params"] = {"description": "Parameters of that type."}
