"""Which names a folder of weights and a model must have in common, and which may differ."""

import logging
import re
from typing import Any

from pipemega.errors import CheckpointError
from pipemega.hf.key_mapping import KeyMapping
from pipemega.hf.safetensors_files import listed
from pipemega.hf.whole_model import whole_model

_log = logging.getLogger(__name__)


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
