"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors.

base_model.model.<name of a linear>.lora_A.weight    [r, in]
base_model.model.<name of a linear>.lora_B.weight    [out, r]
base_model.model.<name of a module>.weight           of modules_to_save (`lora.train_also`)
base_model.model.<name of a module>.base_layer.weight    of the model, if peft adapted its head
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.config.sections.run_sections import LoraSection
from pipemega.errors import CheckpointError, ConfigError
from pipemega.parameters import is_transposed, shard_of
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import LocalModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Key of peft -> key of the section `lora`.
_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "modules_to_save": "train_also",
}
# Keys that do not change what the adapter computes.
_NEUTRAL = {
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "init_lora_weights", "fan_in_fan_out", "peft_version", "megatron_core",
    "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "ensure_weight_tying",
}  # fmt: skip
# Ways to initialize A and B that subtract their product from W.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# These choose linears; the names in the weights say which ones were chosen.
_CHOICE = {"exclude_modules", "layers_to_transform", "layers_pattern"}


def section_of(section: LoraSection) -> LoraSection:
    """Return `section` with the values of the adapter at `lora.path`.

    Raises:
        ConfigError: a file is missing or damaged, the adapter needs an option of peft that is not
            supported, or a key of the section differs; names the file and the key.
    """
    if section.path is None:
        return section
    folder = Path(section.path)
    path = folder / CONFIG
    config = _read_config(path)
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(
            f"{path} describes an adapter of the kind {config['peft_type']}: lora.path takes LORA"
        )
    initial = config.get("init_lora_weights")
    if str(initial).startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{path} has init_lora_weights: {json.dumps(initial)}, which changes the weights of "
            f"the model: save the adapter with peft's path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if key not in _KEYS and key not in _NEUTRAL | _CHOICE and value not in _OFF:
            raise ConfigError(
                f"{path} has {key}: {json.dumps(value)}, which is not supported here: merge the "
                f"adapter into the weights with peft (merge_and_unload), and train a new one"
            )
    values = {ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config}
    values = {key: value for key, value in values.items() if value is not None}
    if any(config.get(key) not in _OFF for key in _CHOICE):
        values["targets"] = linears_of(folder)
    for key in ("targets", "train_also"):
        if isinstance(values.get(key), list):
            values[key] = tuple(sorted(values[key]))
    if "alpha" in values:
        values["alpha"] = float(values["alpha"])
    return section.with_file_values(values)


# How peft writes that an option is not used.
_OFF: tuple[Any, ...] = (None, False, "none", [], {})


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            f"lora.path: {path.parent} has no {CONFIG}; give a folder that peft's save_pretrained "
            f"or `pipemega hf export --adapter` wrote"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is damaged: it should contain a JSON object")
    return config


def _open(folder: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            "adapters are stored in safetensors: pip install 'pipemega[hf]'"
        ) from error
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        advice = (
            "; adapter_model.bin is not read, because unpickling can run code: load it with peft "
            "and save_pretrained() it again"
        )
        raise ConfigError(f"lora.path: {folder} has no {WEIGHTS}{advice if pickled else ''}")
    try:
        return safe_open(str(path), "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again") from error


def linears_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the linears that the adapter in `folder` adapts."""
    suffix = ".lora_A.weight"
    names = [name for name in _open(folder).keys() if name.endswith(suffix)]  # noqa: SIM118
    return tuple(sorted(name.removeprefix(PREFIX).removesuffix(suffix) for name in names))


@torch.no_grad()
def load_adapter(folder: Path, net: PipelineModule, model: LocalModel) -> None:
    """Fill the trainable parameters on this rank, and frozen ones that `folder` has too.

    Args:
        net: the whole model, with adapters.
        model: the part of the model on this rank.

    Raises:
        CheckpointError: the file has other tensors than the model, or other shapes; names both; on
            every rank.
    """
    trained = {
        net.module_name(f"layers.{position}.{name}"): parameter.requires_grad
        for position, layer in enumerate(net.meta_layers)
        for name, parameter in layer.named_parameters()
    }
    expected = {name for name, is_trained in trained.items() if is_trained}
    opened, path = _open(folder), folder / WEIGHTS
    keys = {k.removeprefix(PREFIX).replace(".base_layer.", "."): k for k in opened.keys()}  # noqa: SIM118
    others = {other for name in trained for other in net.other_names(name)}
    missing = sorted(expected - set(keys))
    unexpected = sorted(set(keys) - set(trained) - others)
    if missing or unexpected:
        lists = (_listed("it lacks", missing), _listed("the model has no", unexpected))
        raise CheckpointError(
            f"{path} is the adapter of another model: {'; '.join(filter(None, lists))}",
            on_every_rank=True,
        )
    for logical, parameter in model.parameters.items():
        name = net.module_name(logical)
        if name not in keys:
            continue
        full = opened.get_tensor(keys[name])
        for other in net.other_names(name):
            same = other in keys and torch.equal(full, opened.get_tensor(keys[other]))
            if not same and (other in keys or parameter.requires_grad):
                raise CheckpointError(
                    f"the adapter {path} changes {name} but not {other} in the same way, and the "
                    "model ties them: train the adapter with peft's ensure_weight_tying, or set "
                    "tie_word_embeddings to false in the model's config.json",
                    on_every_rank=True,
                )
        full = full.T if is_transposed(parameter) else full
        shard = shard_of(parameter)
        if tuple(full.shape) != shard.shape:
            raise CheckpointError(
                f"{path} has {name} of shape {list(full.shape)}, and the model of shape "
                f"{list(shard.shape)}",
                on_every_rank=True,
            )
        shard.copy_from_full(full.to(parameter.dtype), parameter.data)


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}" if names else ""


def save_adapter(
    folder: Path,
    section: LoraSection,
    tensors: Mapping[str, Tensor],
    *,
    fan_in_fan_out: bool = False,
    base: str | None = None,
    task_type: str | None = None,
    ties: bool = False,
) -> None:
    """Write an adapter that peft loads.

    Args:
        section: rank, alpha, dropout.
        tensors: name in the original model -> tensor, such as "lm.q_proj.lora_A.weight".
        fan_in_fan_out: the linears are Conv1Ds of transformers (GPT2).
        base: name or path of the original model.
        task_type: task type of peft, such as "CAUSAL_LM".
        ties: `tensors` has tied ones, under all of their names.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            "adapters are stored in safetensors: pip install 'pipemega[hf]'"
        ) from error
    suffix = ".lora_A.weight"
    linears = sorted(name.removesuffix(suffix) for name in tensors if name.endswith(suffix))
    trained = sorted({n.rpartition(".")[0] for n in tensors if ".lora_" not in n})
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "r": section.r,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "use_rslora": section.rslora,
        "target_modules": linears,
        "modules_to_save": trained or None,
        "fan_in_fan_out": fan_in_fan_out,
        "ensure_weight_tying": ties,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    whole = {PREFIX + name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
