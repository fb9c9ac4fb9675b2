"""Make a config from the arguments of Megatron-LM or Megatron-DeepSpeed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import json5

from pipemega.compat.megatron.arguments import ARGUMENTS, Given, Remark
from pipemega.compat.megatron.model_keys import mesh_section, model_section, pipeline_section
from pipemega.compat.megatron.shell_words import names_of_unknown, within_unknown_folder
from pipemega.compat.megatron.training_keys import (
    batch_keys,
    checkpoint_section,
    data_section,
    optimizer_section,
    output_keys,
    precision_keys,
    scheduler_section,
    training_section,
    zero_section,
)
from pipemega.compat.megatron.training_launch import FINE_TUNES, TrainingLaunch
from pipemega.errors import ConfigError

# Megatron creates the optimizer and the schedule, and sets the batch size, from its arguments.
_OF_MEGATRON = ("optimizer", "scheduler", "train_batch_size", "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps")  # fmt: skip
_ONE_WHOLE = ("fp16", "bf16", "bfloat16")


class MegatronConversion(NamedTuple):
    """A config, and what differs from the launch.

    Args:
        config: the config, as JSON values.
        remarks: the remarks, in the order of the arguments.
        settings: (name, keys that it sets) of each argument that has a counterpart.
    """

    config: dict[str, Any]
    remarks: tuple[Remark, ...]
    settings: tuple[tuple[str, str], ...]

    @property
    def is_complete(self) -> bool:
        """Whether the config trains what the launch trains."""
        return not any(remark.level in ("refused", "unknown") for remark in self.remarks)


def convert(launch: TrainingLaunch, folder: Path | None = None) -> MegatronConversion:
    """Return the config of a training.

    Args:
        folder: where the DeepSpeed JSON and files with data paths are searched.

    Raises:
        ConfigError: the program does not pretrain.
    """
    if FINE_TUNES.search(launch.program.rpartition("/")[2]):
        raise ConfigError(
            f"{launch.program} fine-tunes, and from-megatron converts pretraining: for prompts and "
            f"answers set data.format and data.path (docs/finetuning.md)"
        )
    given = Given.of_words(launch.words)
    for note in launch.notes:
        given.say("note", "", note)
    if launch.trains_other_model:
        given.say("refused", "", f"{launch.program} does not train a GPT: there is model.type "
                  "'hf', and PipelineModule for your own layers")  # fmt: skip
    config = _config(given, folder)
    if "deepspeed-config" in given:
        config = _with_deepspeed(given, config, launch.files, folder)
    given.report_absent()
    _report_unset(given)
    settings = tuple(
        (given.written[name], ARGUMENTS[name].keys)
        for name in given.values
        if name in ARGUMENTS and ARGUMENTS[name].keys
    )
    return MegatronConversion(config, tuple(dict.fromkeys(given.remarks)), settings)


def _config(given: Given, folder: Path | None) -> dict[str, Any]:
    model, mesh = model_section(given), mesh_section(given)
    training = training_section(given)
    config: dict[str, Any] = {
        **{key: value for key, value in batch_keys(given).items() if value is not None},
        "seed": given.number("seed", 1234),
        "gradient_clipping": given.number("clip-grad", 1.0),
        **precision_keys(given),
        "mesh": mesh,
        "pipeline": pipeline_section(given, model, mesh["pipeline"]),
        "model": model,
        "data": data_section(given, folder),
        "optimizer": optimizer_section(given),
        "scheduler": scheduler_section(given, training),
        "zero_optimization": zero_section(given),
        "training": training,
        "checkpoint": checkpoint_section(given, training),
        **output_keys(given),
    }
    return {key: value for key, value in config.items() if value != {}}


def _with_deepspeed(
    given: Given, config: dict[str, Any], files: Mapping[str, str], folder: Path | None
) -> dict[str, Any]:
    """Add the keys of the DeepSpeed JSON, which take precedence over Megatron's arguments."""
    content = _deepspeed_json(given, files, folder)
    if content is None:
        return config
    for key in _OF_MEGATRON:
        value = content.pop(key, None)
        if value is None or key in ("optimizer", "scheduler"):
            if value is not None:
                given.say("ignored", "deepspeed-config", f"its key {key}: Megatron's arguments "
                          "are used")  # fmt: skip
        elif key not in config and not (
            key == "gradient_accumulation_steps" and "train_batch_size" in config
        ):
            config[key] = value
        elif key in config and config[key] != value and value != "auto":
            given.say("changed", "deepspeed-config", f"its {key} is {value}; {config[key]} from "
                      "Megatron's arguments is used")  # fmt: skip
    _report_differences(given, content)
    if any(key in content for key in _ONE_WHOLE):
        config = {key: value for key, value in config.items() if key not in ("fp16", "bf16")}
    clip = content.get("gradient_clipping")
    if clip is not None and "clip-grad" in given and clip != config["gradient_clipping"]:
        given.say(
            "changed", "clip-grad", f"gradient_clipping of the DeepSpeed file is used: {clip}"
        )
    if "zero_optimization" in content:
        config.pop("zero_optimization", None)
    if given.values.get("log-interval"):
        content.pop("steps_per_print", None)
    else:
        config.pop("steps_per_print", None)
    return config | {key: value for key, value in content.items() if value is not None}


def _report_differences(given: Given, content: Mapping[str, Any]) -> None:
    """Say which precision and stage of the arguments the DeepSpeed file replaces."""
    sections = {name: content[name] for name in _ONE_WHOLE if isinstance(content.get(name), dict)}
    enabled = {name.replace("bfloat16", "bf16")
               for name, section in sections.items() if section.get("enabled")}  # fmt: skip
    for name in ("bf16", "fp16"):
        if sections and given.flag(name) and name not in enabled:
            precision = " and ".join(sorted(enabled)) or "fp32"
            given.say("changed", name, f"the precision of the DeepSpeed file is used: {precision}")
    zero = content.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage is not None and "zero-stage" in given and stage != given.number("zero-stage"):
        given.say("changed", "zero-stage", "zero_optimization.stage of the DeepSpeed file is "
                  f"used: {stage}")  # fmt: skip


def _deepspeed_json(
    given: Given, files: Mapping[str, str], folder: Path | None
) -> dict[str, Any] | None:
    values = given.values["deepspeed-config"]
    name = values[0] if values else ""
    text = files.get(name)
    name = within_unknown_folder(name) or name
    for base in (folder, Path.cwd()):
        path = None if base is None or names_of_unknown(name) or not name else base / name
        if text is None and path is not None and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
    if text is None:
        given.say("unknown", "deepspeed-config", "the file was not found: its keys are not in this "
                  "config; add them, or convert again in its folder")  # fmt: skip
        return None
    try:
        # A value that the script does not determine has no place in JSON.
        content = json5.loads(re.sub("\x01[^\x02]*\x02", "null", text))
    except ValueError as error:
        given.say("unknown", "deepspeed-config", f"the file is not JSON: {error}")
        return None
    if not isinstance(content, dict):
        given.say("unknown", "deepspeed-config", "the file is not a JSON object")
        return None
    return content


def _report_unset(given: Given) -> None:
    """Say which variables are left as text in the config."""
    found: dict[str, None] = {}
    for name, values in given.values.items():
        if name in ARGUMENTS and ARGUMENTS[name].kind in ("text", "list"):
            found |= dict.fromkeys(one for value in values for one in names_of_unknown(value))
    if found:
        names = ", ".join(found)
        given.say("note", "", f"without a value in the script, and left as text: {names}; --var "
                  "NAME=VALUE sets a variable")  # fmt: skip
