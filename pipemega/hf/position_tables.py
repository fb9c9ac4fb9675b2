"""The longest sequence that the position embeddings of a model have."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription

_KEYS = ("max_position_embeddings", "max_target_positions", "n_positions")
# Rows of a table besides the positions: those of padding and of an offset.
_MOST_EXTRA_ROWS = 8


def declared_positions(config: Any) -> dict[str, int]:
    """Return the keys of a `PretrainedConfig` that limit the positions of text, with values."""
    text = config.get_text_config()
    found = {key: getattr(text, key, None) for key in _KEYS}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def refuse_missing_positions(d: ModelDescription, seq_length: int) -> None:
    """Refuse samples that are longer than a table of positions.

    Raises:
        ConfigError: names the table and both numbers.
    """
    for name, positions in _tables(d):
        if seq_length > positions:
            raise ConfigError(
                f"model.seq_length is {seq_length}, but {d.class_name} has a table of {positions} "
                f"positions ({name}): set model.seq_length to at most {positions}",
                on_every_rank=True,
            )


def untrained_rotary_positions(config: Any, seq_length: int) -> str | None:
    """Return a warning about samples that are longer than the rotary positions of the config.

    They can be computed; None: the samples are not longer, or the positions are not rotary.
    """
    text, declared = config.get_text_config(), declared_positions(config)
    rope = getattr(text, "rope_parameters", None)
    if not rope or not declared or getattr(text, "alibi", False):
        return None
    key, positions = min(declared.items(), key=lambda item: item[1])
    original = rope.get("original_max_position_embeddings", positions)
    if seq_length <= max(positions, original * rope.get("factor", 1)):
        return None
    return (
        f"model.seq_length is {seq_length}, and config.json of the model has {key} {positions}: "
        f"rotary positions above it were not trained; if this is intended, increase {key} there "
        f"(rope_parameters can scale the positions)"
    )


def _tables(d: ModelDescription) -> Iterator[tuple[str, int]]:
    """Yield the name of each table of text positions, and how many positions it has."""
    declared = declared_positions(d.config)
    if not declared:
        return
    least = min(declared.values())
    for prefix, module in (("", d.model), (f"{d.places[0][1]}.", d.layers[0])):
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding) and _names_positions(name):
                padding = -1 if part.padding_idx is None else part.padding_idx
                rows = part.num_embeddings
                if least <= rows <= least + _MOST_EXTRA_ROWS:
                    yield prefix + name, rows - int(getattr(part, "offset", 0)) - padding - 1
        for name, buffer in module.named_buffers():  # sines and cosines, as GPT-J has them
            if buffer.dim() == 2 and _names_positions(name) and len(buffer) == least:
                yield prefix + name, least


def _names_positions(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "pos" in last or last == "wpe"
