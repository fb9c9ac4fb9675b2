"""SafetensorsSource: each rank reads its slices of a folder's weights; no rank holds the model.

Which names a folder of weights and a model must have in common, and which may differ.

First values of the parameters of one part of a model: from a source, or as HF initialises it.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.errors import CheckpointError, ConfigError
from pipemega.hf.placeholders import allocate, whole_model
from pipemega.hf.weights.key_mapping import KeyMapping, StoredPart
from pipemega.hf.weights.safetensors_files import (
    SafetensorsFolder,
    WeightSource,
    is_transposed,
)
from pipemega.parameters import shard_of
from pipemega.printing import listed

_log = logging.getLogger(__name__)

Segment = tuple[int, int, int]
"""(start in the model's tensor, length, start in the local tensor)."""


def check_names(mapping: KeyMapping, model: Any, folder: object) -> None:
    """Compare the names of a folder and of a model.

    If the folder contains a model of another class, its head may be missing, and what that class
    does not have (BERT's pooler). Keys that only another class of the family has are not used.

    Raises:
        CheckpointError: lists the names that only one of the two has.
    """
    missing = [
        name
        for name in mapping.shapes
        if not mapping.stored_names(name)
        and not _matches(model._keys_to_ignore_on_load_missing, name)
    ]
    unexpected = [key for key in mapping.unexpected if not _is_ignored(model, key)]
    saved_class = next(iter(model.config.architectures or ()), type(model).__name__)
    head: list[str] = []
    if missing and saved_class != type(model).__name__:
        base, saved = f"{model.base_model_prefix}.", set(_names_of(model, saved_class) or missing)
        head = [name for name in missing if not name.startswith(base) or name not in saved]
        missing = [name for name in missing if name not in head]
    others = _names_of_other_classes(model) if unexpected else set()
    not_used = [key for key in unexpected if key in others]
    unexpected = [key for key in unexpected if key not in others]
    if missing or unexpected:
        lacks = f"the files lack {listed(missing)}" if missing else ""
        extra = f"no parameter fits {listed(unexpected)} of the files" if unexpected else ""
        raise CheckpointError(
            f"{folder} has other weights than a {type(model).__name__} of its config.json: "
            f"{'; '.join(filter(None, (lacks, extra)))}. Use the config.json of these weights, and "
            f"check the task",
            on_every_rank=True,
        )
    if not_used:
        _log.info("%s: a %s does not use %s", folder, type(model).__name__, listed(not_used))
    if head:
        text = "%s contains a %s, without %s: they start with new values"
        _log.warning(text, folder, saved_class, listed(head))


def _is_ignored(model: Any, key: str) -> bool:
    """Return whether transformers, too, ignores a key that older versions have written."""
    if _matches(model._keys_to_ignore_on_load_unexpected, key):
        return True
    buffers = [name for name, _ in model.named_buffers()]
    return any(
        key.endswith(old) and any(name.endswith(old) for name in buffers)
        for old in ("rotary_emb.inv_freq", "position_ids")
    )


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _names_of(model: Any, class_name: str) -> set[str]:
    """Return the names of a class of transformers with this config; none if it has no such one."""
    import transformers

    known = hasattr(transformers, class_name)
    return set(whole_model(model.config, class_name).state_dict()) if known else set()


def _names_of_other_classes(model: Any) -> set[str]:
    """Return names that other classes of the family have: a pooler, the head of the pretraining."""
    import transformers

    names: set[str] = set()
    for auto in (transformers.AutoModel, transformers.AutoModelForPreTraining):
        if type(model.config) not in auto._model_mapping:
            continue
        found = auto._model_mapping[type(model.config)]
        found = found[0] if isinstance(found, tuple | list) else found
        tensors = _names_of(model, found.__name__)
        # A base model is stored with and without the prefix.
        names |= tensors | {f"{model.base_model_prefix}.{name}" for name in tensors}
    return names


class SafetensorsSource:
    """A WeightSource that reads a folder as `save_pretrained` writes it.

    Values are cast to the dtype of the tensors that are filled. Of experts that are stored one by
    one, a rank reads its slice of each.

    Args:
        folder: the folder of the safetensors files.
        config: the `PretrainedConfig` of the folder.
        class_name: the class of transformers that is built.

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged, or has other tensors than
            the model.
    """

    def __init__(self, folder: str | Path, config: Any, class_name: str) -> None:
        self.files = SafetensorsFolder(folder)
        self._model = whole_model(config, class_name)
        self._mapping = KeyMapping(self.files, self._model)
        check_names(self._mapping, self._model, self.files.folder)
        different = self._mapping.different_shapes()
        if different:
            raise CheckpointError(
                f"{self.files.folder} has other shapes than its config.json: "
                f"{listed(different, 3)}. Use the config.json of these weights",
                on_every_rank=True,
            )

    def has(self, name: str) -> bool:
        return bool(self._mapping.stored_names(name))

    def load(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor`, this rank's shard of the model's tensor `name`.

        Raises:
            CheckpointError: the files have several values of a tied tensor.
        """
        stored = self._mapping.stored_names(name)
        with torch.no_grad():
            self._fill(stored[0], tensor.data, tensor)
            for other in stored[1:]:
                again = torch.empty_like(tensor)
                self._fill(other, again, tensor)
                if not torch.equal(tensor, again):
                    raise CheckpointError(
                        f"{self.files.folder} has different values of {stored[0]} and {other}, "
                        f"and its config.json ties them: set tie_word_embeddings to false there"
                    )

    def _fill(self, name: str, local: Tensor, like: Tensor) -> None:
        """Copy the shard of `like` into `local`."""
        shard, transposed = shard_of(like), is_transposed(like)
        if name in self._mapping.conversions:
            made = self._mapping.conversions[name].convert(
                self._model, lambda key: self.files.read(key).clone()
            )[name]
            shard.copy_from_full(made.T if transposed else made, local)
            return
        view = local.T if transposed else local
        experts: dict[int, Segment] = {}
        if shard.rows is not None:
            experts[0] = (shard.rows[0], shard.rows[1] - shard.rows[0], 0)
        cuts = [experts]
        if shard.dim is not None:
            # Padding stays 0.
            local.zero_()
            dim = local.dim() - 1 - shard.dim if transposed else shard.dim
            cuts = [experts | {dim: segment} for segment in shard.segments]
        for part in self._mapping.parts[name]:
            for cut in cuts:
                self._copy_part(part, view, cut)

    def _copy_part(self, part: StoredPart, local: Tensor, cut: Mapping[int, Segment]) -> None:
        """Copy the common region of a stored tensor and of one segment in each dim of the shard.

        Args:
            local: the local tensor, with its dims in the order of the files.
            cut: dim -> segment; other dims are whole.
        """
        index: list[slice] = []
        for d, (low, high) in enumerate(part.box):
            first, last, at = low, high, low
            if d in cut:
                start, length, offset = cut[d]
                first, last = max(low, start), min(high, start + length)
                at = first - start + offset
            if first >= last:
                return
            local = local.narrow(d, at, last - first)
            index.append(slice(first - low, last - low))
        own = index if part.expert is None else index[1:]
        local.copy_(self.files.read(part.key, tuple(own)))


def set_first_values(
    module: nn.Module,
    source: WeightSource | None,
    whole_model: Callable[[], Any],
    names: Mapping[str, str],
) -> None:
    """Load parameters and persistent buffers of `module`; initialise those without a value.

    Args:
        source: None: all parameters are initialised.
        whole_model: see `_initialize_as_hf`.
        names: name in `module` -> name in the state_dict of the transformers model.
    """
    tensors = module.state_dict(keep_vars=True)
    if source is None or not all(source.has(names[name]) for name in tensors):
        _initialize_as_hf(module, whole_model, names)
    if source is not None:
        for name, tensor in tensors.items():
            if source.has(names[name]):
                source.load(names[name], tensor)


def _initialize_as_hf(
    module: nn.Module, whole_model: Callable[[], Any], names: Mapping[str, str]
) -> None:
    """Fill the shards of `module` with slices of a whole that HF has initialised on the CPU.

    The values come from torch's CPU generator, so they are equal on every mesh if its seed is.

    Args:
        whole_model: returns the transformers model with the unsharded part and no other layers,
            on meta; called once.
        names: see `set_first_values`. Parameters that the whole does not have are tied to those
            of another part, and are skipped.

    Raises:
        ConfigError: HF does not initialise a parameter.
    """
    with torch.device("cpu"), torch.no_grad():
        whole: Any = allocate(whole_model(), "cpu")
        for parameter in whole.parameters():
            parameter.fill_(torch.nan)
        for part in whole.modules():
            vars(part).pop("_is_hf_initialized", None)
        whole.initialize_weights()
    values: dict[str, Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        full = values.get(names[name])
        if full is None:
            continue
        if bool(full.isnan().any()):
            raise ConfigError(
                f"{type(whole).__name__} does not initialise {names[name]}: transformers has no "
                f"rule for it. Train from saved weights (pretrained=True)",
                on_every_rank=True,
            )
        shard_of(parameter).copy_from_full(full.T if is_transposed(parameter) else full, parameter)
