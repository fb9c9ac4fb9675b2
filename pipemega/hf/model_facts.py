"""VocabularyNames: where a model has its table of embeddings and its head, and whether tied.

The longest sequence that the position embeddings of a model have.

Which layers of a transformers model are equal, so that a plan measures only one of them.
"""

from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription


class VocabularyNames:
    """Names of the modules with the vocabulary.

    Attributes:
        table: the embedding of the vocabulary; "" if the model has none (images).
        head: the linear that computes logits over the vocabulary; None if the model has none.
        head_is_tied: the head uses the weight of the table.
    """

    def __init__(self, description: ModelDescription) -> None:
        self._tied = description.tied
        self._owners = description.owners
        model = description.model
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        words = _input_embeddings(model)
        self.table = ""
        self.head: str | None = None
        if isinstance(words, nn.Embedding):
            self.table = self._name_of(words)
            head = model.get_output_embeddings()
            self.head = None if head is None else self._name_of(head)
        self.head_is_tied = self._is_tied(self.head)

    def _name_of(self, module: nn.Module) -> str:
        names = [name for name, other in self._modules.items() if other is module]
        saved = [name for name in names if f"{name}.weight" not in self._tied]
        return (saved or names)[0]

    def _is_tied(self, module: str | None) -> bool:
        return module is not None and self._tied.get(f"{module}.weight") == f"{self.table}.weight"

    def is_table(self, name: str) -> bool:
        """Return whether a module is the table, or an embedding with its weight."""
        module = self._modules.get(name)
        if not self.table or not isinstance(module, nn.Embedding):
            return False
        return module is self._modules[self.table] or self._is_tied(name)

    @property
    def is_tied(self) -> bool:
        """Return whether several modules have the weight of the table."""
        return bool(self.table) and f"{self.table}.weight" in self._tied.values()

    def owner(self, name: str) -> str:
        """Return the outermost module with parameters that contains `name`."""
        return next(o for o in self._owners if name == o or name.startswith(f"{o}."))

    def drop_second_bias(self, model: nn.Module) -> None:
        """Remove the second name of the bias of the head (BERT's), which the head has."""
        other = self._tied.get(f"{self.head}.bias")
        if other is not None:
            path, _, last = other.rpartition(".")
            model.get_submodule(path)._parameters.pop(last)


def _input_embeddings(model: Any) -> nn.Module | None:
    try:
        embeddings: nn.Module = model.get_input_embeddings()
    except NotImplementedError:  # models without tokens, such as CLIP's image classifier
        return None
    return embeddings


_KEYS = ("max_position_embeddings", "max_target_positions", "n_positions")
# A table may have rows besides the positions: for padding and for an offset.
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


# Attributes in which equal layers differ: their position.
_POSITIONS = ("layer_idx", "layer_id", "layer_number")


def equality_key(description: ModelDescription, index: int) -> Hashable:
    """Return a key that is equal for layers with the same structure, sizes and settings."""
    d = description
    stack, _ = d.places[index]
    number, length = index - d.first_of_stack[stack], sum(s == stack for s, _ in d.places)
    # The model may choose the mask of a layer by these lists of its config.
    lists = {
        name: value[number]
        for name, value in vars(d.config.get_text_config()).items()
        if isinstance(value, list | tuple) and len(value) == length
    }
    return repr((stack, sorted(lists.items()), tuple(_settings(d.layers[index]))))


def _settings(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, module in layer.named_modules():
        values = sorted(
            (key, value)
            for key, value in vars(module).items()
            if key not in _POSITIONS and isinstance(value, bool | int | float | str | None)
        )
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        yield name, type(module).__qualname__, values, tensors
