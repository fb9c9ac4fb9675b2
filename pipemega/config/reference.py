"""The JSON Schema and the reference pages, made from the table that the checks use.  Floor 1."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from pipemega.config import optimizer, scheduler
from pipemega.config.config import Config
from pipemega.config.keys import Section, marks, section_in, spell
from pipemega.config.reading import KeyPath, dotted

_INTRODUCTION = """\
# The config, key by key

*Made by `python -m pipemega config docs` from `pipemega/config/`; do not edit.*

One JSON file says everything about a run. It is DeepSpeed's JSON with sections of our own: `mesh`,
`model`, `data`, `training`, `monitor`, and more keys in `pipeline`, `checkpoint` and `wandb`.

- `//`, `/* */` and `#` comments and trailing commas are accepted; a key that begins with `_comment`
  is dropped, wherever it stands.
- A key that is not on this page or the next is an error that names the nearest one. Errors are also
  a key that is written twice, a value of another type (`"16"` is not 16, `true` is not 1), and a
  number that is not finite.
- `"auto"` as the value of a key of DeepSpeed's is the same as leaving the key out.
- `--set pipeline.schedule=gpipe`, on the command line, writes over a key of the file.
- `python -m pipemega check CONFIG` validates a file, `python -m pipemega config schema` prints a
  JSON Schema for editors. In Python: `pipemega.config.load(path_or_dict)`.
- Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`, two are
  enough, and one of the first two alone means one micro-batch per step.

What DeepSpeed's other keys come to is in [deepspeed.md](deepspeed.md).
"""

_DEEPSPEED = """\
# DeepSpeed's keys, and what becomes of each

*Made by `python -m pipemega config deepspeed` from `pipemega/config/`; do not edit.*

Nothing is accepted and silently dropped. A key is

- **honoured**: the run does what it says;
- **ignored**: accepted, with a warning that says what is not done and why. There is no warning
  where its value says what is done anyway;
- **refused**: an error that says why, and the way out. Only the default is accepted, and what
  switches the thing off.

Different from DeepSpeed: every unknown key is an error, at the top level and in `params` too;
`pipeline.stages`, `partition` and `seed_layers` work; a file is JSON with comments, not Hjson;
`steps_per_print` is 10 and not silence; `wandb.project` and the `job_name`s are "pipemega".
"""


def schema() -> dict[str, Any]:
    """The JSON Schema of a config file."""
    found = Config.model_json_schema()
    for kind in (found, *found.get("$defs", {}).values()):
        _open_to_comments(kind)
    found["properties"]["bfloat16"] = {"$ref": "#/$defs/Bf16Section"}
    for name, table in (
        ("OptimizerSection", optimizer.PARAMS),
        ("SchedulerSection", scheduler.PARAMS),
    ):
        _params_by_type(found["$defs"], name, table)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _open_to_comments(kind: dict[str, Any]) -> None:
    """One object: comments are allowed anywhere, and each property is made fit for editors."""
    kind["patternProperties"] = {"^_comment": {}}
    kind["properties"] = {k: _for_editors(v) for k, v in kind["properties"].items()}


def _for_editors(value: dict[str, Any]) -> dict[str, Any]:
    """One property: our own marks become words that an editor shows, and "auto" is allowed."""
    found = value.pop("pipemega", {})
    if why := found.get("why"):
        value["description"] = f"{value.get('description', '')} {found['status']}: {why}"
    if found.get("status") in ("ignored", "refused", "block"):
        value["deprecated"] = True
    if found.get("own") or "auto" in json.dumps(value.get("anyOf", "")):
        return value
    words = ("description", "default", "title", "deprecated")
    texts: dict[str, Any] = {word: value.pop(word) for word in words if word in value}
    return {**texts, "anyOf": [value, {"const": "auto"}]}


def _params_by_type(
    definitions: dict[str, Any], name: str, table: Mapping[str, type[Section]]
) -> None:
    """`params` has the keys that `type` asks for."""
    cases = []
    for word, kind in table.items():
        part = kind.model_json_schema()
        _open_to_comments(part)
        definitions[kind.__name__] = part
        cases.append(
            {
                "if": {"properties": {"type": {"const": word}}},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{kind.__name__}"}}},
            }
        )
    definitions[name]["allOf"] = cases
    definitions[name]["properties"]["params"] = {"description": "What that type takes."}
    definitions[name]["required"] = ["type"]


def reference_page() -> str:
    """docs/config.md: every key that does something."""
    parts = [_INTRODUCTION, *_tables(_is_for_reference, "type", _reference_row)]
    return "\n".join(parts)


def deepspeed_page() -> str:
    """docs/deepspeed.md: every key of DeepSpeed's."""
    parts = [_DEEPSPEED, *_tables(_is_deepspeeds, "what becomes of it", _deepspeed_row)]
    parts += _refused_types()
    return "\n".join(parts)


def groups() -> Iterator[tuple[str, KeyPath, type[Section]]]:
    """Every section of the file, with its title and path; one for each type of params."""
    yield "Top level", (), Config
    yield from _below(Config, ())


def _below(kind: type[Section], path: KeyPath) -> Iterator[tuple[str, KeyPath, type[Section]]]:
    for name, field in kind.model_fields.items():
        below, here = section_in(field.annotation), (*path, name)
        if below in (optimizer.OptimizerParams, scheduler.SchedulerParams):
            table = optimizer.PARAMS if path == ("optimizer",) else scheduler.PARAMS
            for params in dict.fromkeys(table.values()):
                types = ", ".join(word for word, other in table.items() if other is params)
                yield f"{dotted(here)} of {types}", here, params
        elif below is not None:
            yield dotted(here), here, below
            yield from _below(below, here)


def _tables(keep: Any, third: str, row: Any) -> Iterator[str]:
    for title, _, kind in groups():
        rows = [row(name, field) for name, field in kind.model_fields.items() if keep(field)]
        if not rows:
            continue
        code = title if title == "Top level" else _in_code(title)
        text = "" if kind is Config else f"{_first_line(kind)}\n\n"
        yield f"## {code}\n\n{text}| key | {third} | default | meaning |\n| --- | --- | --- | --- |"
        yield "\n".join(rows) + "\n"


def _in_code(title: str) -> str:
    path, _, types = title.partition(" of ")
    return f"`{path}`" + (f" of {types}" if types else "")


def _first_line(kind: type[Section]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _is_for_reference(field: FieldInfo) -> bool:
    return bool(marks(field)["status"] == "honoured" or marks(field).get("own"))


def _is_deepspeeds(field: FieldInfo) -> bool:
    return not marks(field).get("own") and section_in(field.annotation) is None


def _reference_row(name: str, field: FieldInfo) -> str:
    kind = spell(field.annotation, field.metadata)
    why = marks(field).get("why")
    text = f"{field.description} *{_sentence(why)}*" if why else field.description
    return _row(name, kind, _default(field), text or "")


def _deepspeed_row(name: str, field: FieldInfo) -> str:
    found = marks(field)
    status = {"block": "ignored when off, refused when on"}.get(found["status"], found["status"])
    reasons = {why: None for why in [found.get("why"), *found.get("reasons", {}).values()] if why}
    text = " ".join([field.description or "", *(f"*{_sentence(why)}*" for why in reasons)])
    if found.get("reasons"):
        status = f"refused: {', '.join(map(str, found['reasons']))}"
    return _row(name, status, _default(field), text)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "a section"
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default)}`"


def _row(*cells: str) -> str:
    first, *rest = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| `{first}` | {' | '.join(rest)} |"


def _refused_types() -> list[str]:
    rows = [f"| {name} | {_sentence(why)} |" for name, why in optimizer.REFUSED.items()]
    return [
        "## Optimizers that are refused\n",
        "| `optimizer.type` | why, and what to use |\n| --- | --- |",
        "\n".join(rows) + "\n",
    ]
