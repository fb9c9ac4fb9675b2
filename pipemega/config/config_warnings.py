"""Warnings and notes about a `Config` that is valid."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import to_jsonable_python

from pipemega.config.activation_checkpointing import warnings_of_recompute
from pipemega.config.data import warnings_of_evaluation
from pipemega.config.key_kinds import key_info, sections
from pipemega.config.profilers import warnings_of_profiling
from pipemega.config.source import dotted, show

# Sections and keys that the Trainer of transformers fills if they are "auto".
_FILLED = ("optimizer", "scheduler", "fp16.enabled", "bf16.enabled", "gradient_clipping")


def warnings_of(config: Any) -> Iterator[str]:
    """Yield the keys that are ignored or probably a mistake, as lines for the log."""
    yield from _auto_warnings(config)
    for name in config.adopted_keys:
        yield f"the key {name!r} is not one of pipemega or DeepSpeed: it is in config.user"
    for path, part in sections(config):
        written = [name for name in type(part).model_fields if name in part.model_fields_set]
        for name in written:
            found = key_info(type(part).model_fields[name])
            value = getattr(part, name)
            if found["status"] == "ignored" and value not in found["accepts"]:
                yield f"{dotted((*path, name))} is ignored: {found['why']}"
            elif found["status"] == "block" and value:
                yield f"{dotted((*path, name))} is disabled, and ignored: it is not supported"
        yield from part.remarks()
    yield from warnings_of_recompute(config)
    yield from warnings_of_profiling(config)
    yield from warnings_of_evaluation(config)


def _auto_warnings(config: Any) -> Iterator[str]:
    filled = [path for path in config.auto_keys if {path[0], dotted(path)} & set(_FILLED)]
    if not filled:
        return
    texts = []
    for path in filled:
        value: Any = config
        for name in path:
            value = getattr(value, name, None)
        texts.append(f"{dotted(path)} ({show(to_jsonable_python(value))})")
    name = dotted(filled[0])
    yield (
        f'"auto" means the default of {", ".join(texts)}: the Trainer of transformers would fill '
        f"these keys from its arguments; set the values, such as --set {name}=VALUE"
    )


def notes_of(config: Any) -> Iterator[str]:
    """Yield the defaults that differ between training systems, as lines for the log."""
    if "gradient_clipping" not in config.model_fields_set:
        yield (
            f"gradient_clipping is not set; its default is {config.gradient_clipping:g}, as in "
            "DeepSpeed since June 2026 (0 before); 0 disables clipping"
        )
    tokenizer = None if config.data.mock else config.data.tokenizer
    if config.model and tokenizer and tokenizer == config.model.default_tokenizer():
        yield f"data.tokenizer is {tokenizer}: the tokenizer of the model"
    section = config.optimizer
    decay = getattr(section and section.params, "weight_decay", None)
    # Groups that set the decay show that the user has decided.
    decided = section is not None and any("weight_decay" in group for group in section.groups)
    if (
        decay
        and not decided
        and "weight_decay_norms_and_biases" not in config.training.model_fields_set
    ):
        yield (
            f"optimizer.params.weight_decay {decay:g} also decays norms and biases, as torch and "
            "DeepSpeed do by default; Megatron-LM does not: for its behavior set "
            "training.weight_decay_norms_and_biases to false"
        )
