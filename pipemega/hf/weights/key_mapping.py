"""KeyMapping: which stored tensors each tensor of a transformers model is made of.

Folders can have other names and shapes than the model: experts are stored one by one, for example,
and the model has one tensor of all experts. transformers knows the rules; here they are applied to
names and shapes only.
"""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipemega.errors import CheckpointError
from pipemega.hf.weights.safetensors_files import SafetensorsFolder, listed

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor as a block of a tensor of the model.

        experts.gate_up_proj [expert, 2 ffn, hidden]      expert 1   gate   rows 0 to ffn - 1
                                                                     up     rows ffn to 2 ffn - 1

    Args:
        key: its name in the files.
        shape: its shape in the files.
        expert: its index in the first dim of the model's tensor, which it has not itself; None:
            it has all dims.
        dim, start: where the block starts, along the only other dim in which it is a part.
    """

    key: str
    shape: Shape
    expert: int | None = None
    dim: int = 0
    start: int = 0

    @property
    def box(self) -> list[tuple[int, int]]:
        """[low, high) in each dim of the model's tensor."""
        box = [(0, size) for size in self.shape]
        if self.expert is not None:
            box.insert(0, (self.expert, self.expert + 1))
        if self.start:
            box[self.dim] = (self.start, self.start + box[self.dim][1])
        return box


@dataclass
class Conversion:
    """Stored tensors that transformers converts together into one or more tensors of the model.

    Args:
        name: the name of the first of these tensors.
        keys: (key, pattern of the converter that it matches).
    """

    name: str
    converter: Any
    keys: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return name -> tensor of the model."""
        converter = deepcopy(self.converter)
        for key, pattern in self.keys:
            converter.add_tensor(self.name, key, pattern, read(key))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


class KeyMapping:
    """The tensors of a model, and of which stored tensors each is made.

    Args:
        files: the folder.
        model: the whole model, on the meta device.

    Attributes:
        shapes: name in the model -> shape.
        parts: name -> the stored tensors that are blocks of it.
        conversions: name -> how it is made by any other operation.
        unexpected: keys that have no place in the model.
        same: name of a tied tensor -> all its names.

    Raises:
        CheckpointError: experts are missing, or transformers cannot convert the stored tensors.
    """

    def __init__(self, files: SafetensorsFolder, model: Any) -> None:
        self._files, self._model = files, model
        self.shapes: dict[str, Shape] = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        self.parts: dict[str, list[StoredPart]] = {}
        self.conversions: dict[str, Conversion] = {}
        self.unexpected: list[str] = []
        self.same = tied_names(model)
        for group in self._assign_keys():
            self._add_group(group)

    def stored_names(self, name: str) -> list[str]:
        """Return the names of a tensor that the folder has."""
        names = self.same.get(name, (name,))
        return [n for n in names if n in self.parts or n in self.conversions]

    def _assign_keys(self) -> list[Conversion]:
        """Find what each key of the files becomes; return the groups that need a conversion."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        converter_of = {p: c for c in converters for p in c.source_patterns}
        where = (self._model.base_model_prefix, self.shapes)
        groups: dict[str, Conversion] = {}
        for key in sorted(self._files.entries, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, *where)
            if name not in self.shapes:
                # It has the name of the model already, with or without the prefix.
                plain, _ = rename_source_key(key, [], [], *where)
                name, pattern = (plain, None) if plain in self.shapes else (name, pattern)
            if name not in self.shapes:
                self.unexpected.append(key)
            elif pattern is None:
                self.parts[name] = [StoredPart(key, self._files.entries[key].shape)]
            else:
                group = groups.setdefault(name, Conversion(name, converter_of[pattern]))
                group.keys.append((key, pattern))
        return list(groups.values())

    def _add_group(self, group: Conversion) -> None:
        parts = self._expert_blocks(group)
        if parts is not None:
            self.parts[group.name] = parts
            return
        try:
            made = group.convert(self._model, self.on_meta)
        # An operation of transformers fails with any exception.
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot make {group.name} of the tensors in {self._files.folder}: "
                f"{listed(key for key, _ in group.keys)}: {type(error).__name__}: {error}",
                on_every_rank=True,
            ) from error
        self.conversions |= dict.fromkeys(made, group)

    def _expert_blocks(self, group: Conversion) -> list[StoredPart] | None:
        """Return the stored tensors as blocks of one tensor; None if other operations are needed.

        Experts are stacked; then, for example, all gates and all ups are concatenated.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        merge, *others = group.converter.operations
        if not isinstance(merge, MergeModulelist) or getattr(merge, "dim", 0) != 0:
            return None
        if len(others) > 1 or any(type(op) is not Concatenate or op.dim < 1 for op in others):
            return None
        dim = others[0].dim if others else 1
        keys_of: dict[str, list[str]] = defaultdict(list)
        for key, pattern in group.keys:
            keys_of[pattern].append(key)
        experts, start, parts = self.shapes[group.name][0], 0, []
        for pattern in group.converter.source_patterns:
            keys = keys_of[pattern]
            shapes = {self._files.entries[key].shape for key in keys}
            if len(keys) != experts or len(shapes) != 1:
                sizes = listed(str(list(shape)) for shape in sorted(shapes)) or "none"
                raise CheckpointError(
                    f"{self._files.folder}: {group.name} has {experts} experts of equal shape, and "
                    f"the files have {len(keys)} tensors {pattern!r} (shapes: {sizes})",
                    on_every_rank=True,
                )
            (shape,) = shapes
            parts += [StoredPart(key, shape, e, dim, start) for e, key in enumerate(keys)]
            start += shape[dim - 1]
        return parts

    def on_meta(self, key: str) -> Tensor:
        """Return a stored tensor without values."""
        entry = self._files.entries[key]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def different_shapes(self) -> list[str]:
        """Return a text for each tensor whose shapes in the files and in the model differ."""
        found: dict[str, Shape] = {}
        for name, parts in self.parts.items():
            # Of experts, the last block ends where the tensor ends.
            found[name] = tuple(high for _, high in parts[-1].box)
        for group in {id(group): group for group in self.conversions.values()}.values():
            made = group.convert(self._model, self.on_meta)
            found |= {name: tuple(tensor.shape) for name, tensor in made.items()}
        return [
            f"{name} is {list(shape)} in the files and {list(self.shapes[name])} in the model"
            for name, shape in found.items()
            if name in self.shapes and shape != self.shapes[name]
        ]


def tied_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Return name -> all names of the same tensor, first the one under which HF saves it."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    groups: dict[str, list[str]] = defaultdict(list)
    for alias, name in tied.items():
        while name in tied:
            name = tied[name]
        groups[name].append(alias)
    return {
        name: (first, *aliases) for first, aliases in groups.items() for name in (first, *aliases)
    }
