"""The config section `data` from Megatron's arguments."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipemega.compat.megatron.given import Given
from pipemega.compat.megatron.shell_words import names_of_unknown, shown

_SPLITS = ("train", "valid", "test")
_WHOLE = ("0:1", "0:1.0", "0.0:1.0", "0.0:1")
Blend = str | list[Any]


def data_section(given: Given, folder: Path | None) -> dict[str, Any]:
    """Return the section `data`.

    Args:
        folder: where files with data paths are searched; None: nowhere.
    """
    data: dict[str, Any] = _paths(given, folder)
    if given.flag("mock-data"):
        data = {"mock": True}
    if "data_path" in data:
        data["split"] = given.text("split", "969,30,1").replace("/", ",")
    if not data and not any("data-path" in name or "split-paths" in name for name in given.values):
        given.say("changed", "", "no data: set data.data_path")
    loader = given.text("dataloader-type", "single")
    if loader == "external":
        given.say("refused", "dataloader-type", "an external loader is the training_data of "
                  "pipemega.initialize")  # fmt: skip
    elif loader == "cyclic":
        data["dataloader_type"] = loader
        if given.flag("no-data-sharding"):
            data["data_sharding"] = False
    data["num_workers"] = given.number("num-workers", 2)
    data["cache_path"] = given.text("data-cache-path")
    for name in ("eod-mask-loss", "reset-position-ids", "reset-attention-mask"):
        if given.flag(name):
            data[name.replace("-", "_")] = True
    if "reset_attention_mask" in data:
        data["reset_position_ids"] = True
    data |= _tokenizer(given, masks="eod_mask_loss" in data or "reset_position_ids" in data)
    return {key: value for key, value in data.items() if value is not None}


def _paths(given: Given, folder: Path | None) -> dict[str, Any]:
    """Return the keys of the token files."""
    found: dict[str, Any] = {}
    words = given.values.get("data-path")
    if words is None and "data-args-path" in given:
        words = _words_of_file(given, "data-args-path", folder)
    if words:
        found["data_path"] = blend(words)
    for split in _SPLITS:
        words = given.values.get(f"{split}-data-path")
        if words:
            found[f"{split}_data_path"] = blend(words)
    found |= _splits_of_file(given, folder) | _weighted_splits(given, folder)
    return found


def blend(words: Sequence[str]) -> Blend:
    """Return prefixes, or weights and prefixes, as `data.data_path` takes them."""
    texts = [shown(part) for word in words for part in word.split()]
    if len(texts) == 1:
        return texts[0]
    weights = [_number(text) for text in texts[::2]]
    if len(texts) % 2 == 0 and all(weight is not None for weight in weights):
        pairs = zip(weights, texts[1::2], strict=True)
        return [part for pair in pairs for part in pair]
    return texts


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(given: Given, name: str, folder: Path | None) -> str | None:
    """Return the content of the file that an argument names."""
    path = given.text(name)
    known = path is not None and not names_of_unknown(" ".join(given.values[name]))
    for base in (folder, Path.cwd()) if known else ():
        file = None if base is None else base / Path(path).expanduser()
        if file is not None and file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    given.say("unknown", name, "the file was not found: write its data paths into the config")
    return None


def _words_of_file(given: Given, name: str, folder: Path | None) -> list[str] | None:
    text = _read(given, name, folder)
    return None if text is None else text.split()


def _splits_of_file(given: Given, folder: Path | None) -> dict[str, Any]:
    """Read the JSON file of --per-split-data-args-path: {"train": [...], "valid": [...]}."""
    name = "per-split-data-args-path"
    text = _read(given, name, folder) if name in given else None
    if text is None:
        return {}
    try:
        content = json.loads(text)
        return {f"{split}_data_path": blend([str(word) for word in content[split]])
                for split in _SPLITS if content.get(split)}  # fmt: skip
    except (ValueError, AttributeError, TypeError):
        given.say("unknown", name, 'the file must be JSON such as {"train": [...], "valid": [...]}')
        return {}


def _weighted_splits(given: Given, folder: Path | None) -> dict[str, Any]:
    """Read Megatron-DeepSpeed's `NAME: weight start:end prefix, weight start:end prefix`."""
    found: dict[str, Any] = {}
    for split in _SPLITS:
        name = f"{split}-weighted-split-paths"
        words = given.values.get(name)
        if words is None and f"{name}-path" in given:
            name = f"{name}-path"
            words = _words_of_file(given, name, folder)
        if not words:
            continue
        # Quotes and the group name ("train:") are no part of the data paths.
        text = " ".join(map(shown, words)).replace('"', " ").replace("'", " ")
        groups = [part for part in text.split() if part.endswith(":")]
        if len(groups) > 1:
            given.say("refused", name, "there is one validation set: keep one group")
            continue
        parts = text.split(":", 1)[1] if groups else text
        entries = [part.split() for part in parts.split(",") if part.strip()]
        if any(len(entry) != 3 or entry[1].count(":") != 1 for entry in entries):
            given.say("refused", name, "each entry must be `weight start:end prefix`")
            continue
        if all(entry[1] in _WHOLE for entry in entries):
            words = [word for entry in entries for word in (entry[0], entry[2])]
            found[f"{split}_data_path"] = blend(words)
        else:
            found[f"{split}_data_path"] = ", ".join(" ".join(entry) for entry in entries)
    return found


def _tokenizer(given: Given, masks: bool) -> dict[str, Any]:
    """Return the tokenizer, and the id that ends a document if masks need it without one."""
    kind = given.text("tokenizer-type", "").lower()
    model, vocabulary = given.text("tokenizer-model"), given.text("vocab-file")
    if "null" in kind or (not kind and model is None and vocabulary is None):
        size = given.number("vocab-size")
        eod = given.number("null-tokenizer-eod-id", size)
        return {"eod_id": eod} if masks and eod is not None else {}
    if "bert" in kind:
        given.say("refused", "tokenizer-type", "WordPiece comes from a folder of transformers")
    if model is not None:
        if "tiktoken" in kind and not model.endswith((".model", ".tiktoken")):
            given.say("changed", "tokenizer-model", "a tiktoken vocabulary in NVIDIA's JSON form "
                      "is not read: use a tokenizer.json, or tiktoken:NAME")  # fmt: skip
        elif "sentencepiece" not in kind and "/" in model and not model.startswith(("/", ".", "$")):
            given.say("changed", "tokenizer-model", "nothing is downloaded: give a folder with the "
                      "tokenizer's files")  # fmt: skip
        return {"tokenizer": model}
    merges = given.text("merge-file")
    if vocabulary is not None and merges is not None:
        first, second = PurePosixPath(vocabulary), PurePosixPath(merges)
        beside = first.parent == second.parent
        if not (beside and (first.name, second.name) == ("vocab.json", "merges.txt")):
            return {"tokenizer": f"{vocabulary},{merges}"}
    return {} if vocabulary is None else {"tokenizer": vocabulary}
