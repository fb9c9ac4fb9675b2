"""Random mutations of bytes and JSON trees, for fuzz tests."""

import json
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# Numbers at which formats break.
EDGES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "Adam", "gpipe", "F0@0", "9" * 5000, "1,1,1", "{", "nan", "\x00"]),
)


def fuzzing(examples: int) -> settings:
    """Return settings with fixed examples; FUZZ=20 in the environment: 20 times as many, random."""
    factor = int(os.environ.get("FUZZ", "1"))
    return settings(max_examples=examples * factor, derandomize=factor == 1)


@st.composite
def damaged(draw: Any, raw: bytes) -> bytes:
    """Return `raw` with bytes changed, removed or added."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "insert", "number", "end"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 9))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "number":
            number = draw(st.sampled_from(EDGES))
            data[at : at + 8] = number.to_bytes(8, "little")
        else:
            data += draw(st.binary(min_size=1, max_size=20))
    return bytes(data)


@st.composite
def changed(draw: Any, tree: Any) -> Any:
    """Return a JSON tree with a value replaced, removed, renamed, duplicated or nested."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_paths(tree)))
        kind = draw(st.sampled_from(["scalar", "drop", "wrap", "rename", "swap", "nest"]))
        tree = _at(tree, path, lambda value, kind=kind: _change(draw, value, kind))
    return tree


def _change(draw: Any, value: Any, kind: str) -> Any:
    if kind == "drop" and isinstance(value, dict) and value:
        removed = draw(st.sampled_from(sorted(value)))
        return {key: below for key, below in value.items() if key != removed}
    if kind == "drop" and isinstance(value, list) and value:
        return value[:-1]
    if kind == "rename" and isinstance(value, dict) and value:
        old, new = draw(st.sampled_from(sorted(value))), draw(st.text(max_size=6))
        return {(new if key == old else key): below for key, below in value.items()}
    if kind == "swap" and isinstance(value, list) and len(value) > 1:
        return [*value[1:], value[0], value[0]]
    if kind == "wrap":
        return draw(st.sampled_from([[value], {"type": value}, {"enabled": value}, [value] * 3]))
    if kind == "nest":
        for _ in range(draw(st.sampled_from([3, 50, 200]))):
            value = [value]
        return value
    return draw(SCALARS)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree[:50])
        if isinstance(tree, list) and len(path) < 8
        else ()
    )
    return [path, *(p for key, value in below for p in _paths(value, (*path, key)))]


def _at(tree: Any, path: tuple[Any, ...], change: Any) -> Any:
    if not path:
        return change(tree)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = _at(copy[path[0]], path[1:], change)
    return copy


def text_of(tree: Any) -> str:
    """Return the tree as JSON, at any depth."""
    depth = 0
    while isinstance(tree, list) and len(tree) == 1:
        tree, depth = tree[0], depth + 1
    try:
        inner = json.dumps(tree)
    except RecursionError:
        inner = "[" * 5000 + "]" * 5000
    return "[" * depth + inner + "]" * depth
