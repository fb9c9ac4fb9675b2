"""Tasks: which class of transformers builds the model, and which loss it is trained with."""

from typing import Any

from pipemega.errors import ConfigError
from pipemega.hf.installed_transformers import import_transformers
from pipemega.hf.special_models import SPECIAL_MODELS

# Task -> Auto classes of transformers.
TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("AutoModelForCausalLM",),
    "seq2seq": ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    "masked-lm": ("AutoModelForMaskedLM",),
    "sequence-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "image-classification": ("AutoModelForImageClassification",),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "mask-generation": ("AutoModelForMaskGeneration",),
}
# Of these tasks, only the models of SPECIAL_MODELS.
_SPECIAL_TASKS = ("image-text-to-text", "mask-generation")
# Nearly every family has models for these: they are no default.
TEXT_CLASSIFICATION = ("sequence-classification", "token-classification")


def model_class_of(config: Any, task: str | None) -> Any:
    """Return the class that builds the model of `config` for `task`.

    Args:
        task: a key of TASKS; None: that of `config.architectures`, or the only one of the family.

    Raises:
        ConfigError: the task is unknown, the family has no model for it, or it is not clear.
    """
    if task is not None and task not in TASKS:
        raise ConfigError(
            f"unknown task {task!r}; the tasks are {', '.join(TASKS)}", on_every_rank=True
        )
    classes = {name: found for name in TASKS if (found := _class_for(config, name)) is not None}
    if task is None:
        task = _default_task(config, classes)
    if task not in classes:
        raise ConfigError(
            f"transformers has no model of the family {config.model_type!r} for task {task!r}; "
            f"it has one for: {', '.join(classes) or 'no task that pipemega trains'}",
            on_every_rank=True,
        )
    return classes[task]


def task_of(config: Any, model_class: Any) -> str:
    """Return the task of a class that `model_class_of` has chosen."""
    return next(task for task in TASKS if _class_for(config, task) is model_class)


def _class_for(config: Any, task: str) -> Any:
    transformers = import_transformers()
    for name in TASKS[task]:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, tuple) else found
            if task not in _SPECIAL_TASKS or found.__name__ in SPECIAL_MODELS:
                return found
    return None


def _default_task(config: Any, classes: dict[str, Any]) -> str | None:
    for architecture in config.architectures or ():
        for task, found in classes.items():
            if found.__name__ == architecture:
                return task
    if getattr(config, "is_encoder_decoder", False) and "seq2seq" in classes:
        return "seq2seq"
    defaults = [task for task in classes if task not in TEXT_CLASSIFICATION]
    if len(defaults) == 1:
        return defaults[0]
    if classes:
        named = ", ".join(config.architectures or ()) or "no architecture"
        raise ConfigError(
            f"the config of family {config.model_type!r} names {named}, which is no class of a "
            f"task that pipemega trains; the family has models for {', '.join(classes)}: set the "
            f"task (model.task)",
            on_every_rank=True,
        )
    return None
