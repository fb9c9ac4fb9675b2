"""JSON Schema of the config, for completion and checks in an editor."""

import json
from collections.abc import Mapping
from typing import Any

from pipemega.config import optimizer, scheduler
from pipemega.config.config import Config
from pipemega.config.key_kinds import OF_USERS, Section
from pipemega.config.model_registry import DEFAULT_TYPE, model_types
from pipemega.config.unsupported import STAGE_3_NAMES


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file."""
    found = Config.model_json_schema()
    for kind in (found, *found.get("$defs", {}).values()):
        _adapt_object(kind)
    _add_model_types(found["$defs"])
    definitions = found["$defs"]
    for part, names in ((found, Config.old_names), (definitions["ZeroSection"], STAGE_3_NAMES)):
        part["properties"] |= {old: part["properties"][new] for old, new in names.items()}
    _add_params_by_type(definitions, "OptimizerSection", optimizer.PARAMS)
    definitions["OptimizerSection"]["required"] = ["type"]
    _add_params_by_type(definitions, "SchedulerSection", scheduler.PARAMS)
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
    for word, kind in table.items():
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
