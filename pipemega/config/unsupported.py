"""The DeepSpeed keys that have no counterpart in pipemega; `unsupported_keys.json` has the reasons.

A block (the section of a feature) is accepted with a warning if it is disabled, and refused if it
is enabled. Other keys are ignored with a warning, or refused.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from pipemega.config.declarations import NotNegative, Section, Whole, block, ignored, refused

STAGE_3 = "this key belongs to ZeRO stage 3, which is not supported"

_TYPES: Mapping[str, Any] = {
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
    declare = refused if row.get("status") == "refused" else ignored
    return _TYPES[row["type"]], declare(row["default"], row["text"], row["why"])


def _always_done(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return bool, ignored(row["default"], row["text"], "this is always done", agrees=[True])


def _of_stage_3(row: Mapping[str, Any]) -> tuple[Any, Any]:
    default = row["default"]
    return _TYPES[row["type"]], ignored(default, row["text"], STAGE_3, silent=[default])


if TYPE_CHECKING:
    UnsupportedKeys = Section
    UnsupportedZeroKeys = Section
else:
    _new = partial(create_model, __base__=Section, __module__=__name__)
    UnsupportedKeys = _new(
        "UnsupportedKeys",
        **_blocks(_KEYS["blocks"]),
        **{name: _key(row) for name, row in _KEYS["keys"].items()},
    )
    UnsupportedZeroKeys = _new(
        "UnsupportedZeroKeys",
        **_blocks(_KEYS["zero_blocks"]),
        **{name: _key(row) for name, row in _KEYS["zero_keys"].items()},
        **{name: _always_done(row) for name, row in _KEYS["zero_always"].items()},
        **{name: _of_stage_3(row) for name, row in _KEYS["stage_3"].items()},
    )
