"""The model in a checkpoint, as a model of transformers, and its export.

Export the LoRA adapter of a checkpoint in peft's format.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.save_load import CheckpointReader, open_path
from pipemega.checkpoint.tensors import TensorIndex
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.config.sections.image_model_sections import ViTSection
from pipemega.config.sections.run_sections import LoraSection
from pipemega.errors import CheckpointError
from pipemega.hf.hf_module import HFPipelineModule, from_pretrained
from pipemega.hf.placeholders import import_transformers, whole_model
from pipemega.hf.weights.export import (
    CheckpointTensor,
    ExportOptions,
    ExportSummary,
    ModelToExport,
    StartProgress,
    export,
    refuse_existing,
)
from pipemega.hf.weights.gpt_export import gpt_to_export, vit_to_export
from pipemega.hf.weights.key_mapping import tied_names
from pipemega.hf.weights.safetensors_files import is_transposed
from pipemega.lora.adapters import adapter_of, is_adapter, merged
from pipemega.lora.low_rank import A, B
from pipemega.lora.peft_files import save_adapter

_ANY_MODEL = "`pipemega checkpoint export CHECKPOINT OUT.safetensors` writes those of any model"


def export_checkpoint(
    path: str,
    folder: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    source: str | Path | None = None,
    start: StartProgress | None = None,
) -> ExportSummary:
    """Write the model of a checkpoint, saved on any mesh, as a folder for transformers.

    One process streams the tensors: it needs little more memory than twice the largest of them.

    Args:
        path: a folder of checkpoints, or one checkpoint; or a URL that fsspec opens.
        folder: the folder to write; it must be new or empty.
        tag: the checkpoint in the folder; None: the newest.
        dtype: the dtype of the weights; None: bf16 or fp16 if the run used it, else the dtypes of
            the checkpoint.
        max_shard_size: size of the largest file, in bytes or as "5GB".
        source: a folder whose tokenizer and generation config are copied; None: the one from which
            the model was loaded, if it still exists.
        start: see `ExportOptions`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, transformers has no such model, the
            folder is not empty, or the disk is too small.
        ConfigError: transformers is not installed.
    """
    import_transformers()
    refuse_existing(Path(folder))
    if source is not None and not Path(source).is_dir():
        raise CheckpointError(f"{source} is not a folder: it should contain the tokenizer's files")
    reader = open_path(path, tag)
    options = ExportOptions(
        dtype=dtype or run_dtype(reader),
        max_shard_size=max_shard_size,
        source=Path(source) if source is not None else source_folder(reader),
        start=start,
    )
    return export(reader.tensors, model_to_export(reader), Path(folder), options)


def model_to_export(reader: CheckpointReader) -> ModelToExport:
    """Return the model that a checkpoint contains, with adapters merged into its weights.

    Raises:
        CheckpointError: it has neither a model of transformers nor our own GPT or ViT.
    """
    exported = _base_model(reader)
    section, tensors = lora_of(reader), reader.tensors
    if section is None:
        return exported
    scale = section.scale

    def change(place: CheckpointTensor, tensor: Tensor) -> Tensor:
        names, read = tensors.tensors, tensors.read_full
        return merged(place.key, tensor, place.rows, scale, names, read)

    return replace(exported, change=change)


def lora_of(reader: CheckpointReader) -> LoraSection | None:
    """Return the section `lora` of the run; None if it had no adapters."""
    section = (reader.found.state.get("config") or {}).get("lora")
    return None if section is None else LoraSection.model_validate(section, strict=False)


def _base_model(reader: CheckpointReader) -> ModelToExport:
    state, stored = reader.found.state, reader.tensors.tensors
    saved = state.get("model", {}).get("hf")
    if saved is not None:
        return _hf_to_export(module_of(saved), stored)
    section = (state.get("config") or {}).get("model") or {}
    own_names = {"parameters/layers.0.weight", "parameters/layers.0.projection.weight"}
    if state.get("weights_only") and not own_names & stored.keys():
        raise CheckpointError(
            f"{reader.full_path} contains only weights ({state['weights_only']}), and their "
            f"names are not those of a model of type 'hf', 'gpt' or 'vit': load them in a run "
            f"with this model (checkpoint.load_module_only true), save it, and export that"
        )
    if section.get("type") == "vit":
        return vit_to_export(ViTSection.model_validate(section))
    if section.get("type", "gpt") != "gpt" or "num_layers" not in section:
        kind = repr(section.get("type")) if section else "none: the script built the model itself"
        raise CheckpointError(
            f"{reader.full_path} contains no model that transformers has: model.type is {kind}; "
            f"the weights of types 'hf', 'gpt' and 'vit' can be exported; {_ANY_MODEL}"
        )
    (vocab_size, _), _ = stored["parameters/layers.0.weight"]
    # JSON has lists in place of tuples.
    return gpt_to_export(GPTSection.model_validate(section, strict=False), vocab_size)


def module_of(saved: Mapping[str, Any]) -> HFPipelineModule:
    """Return the module of `HFPipelineModule.checkpoint_metadata()["hf"]`, without weights."""
    import transformers

    config = transformers.CONFIG_MAPPING[saved["config"]["model_type"]].from_dict(saved["config"])
    return from_pretrained(config, pretrained=False)


def source_folder(reader: CheckpointReader) -> Path | None:
    """Return the folder from which the model was loaded, if it still exists."""
    folder = (reader.found.state.get("model", {}).get("hf") or {}).get("folder")
    return Path(folder) if folder is not None and Path(folder).is_dir() else None


def run_dtype(reader: CheckpointReader) -> torch.dtype | None:
    """Return the half precision in which the run computed; None if it did not use one."""
    config = reader.found.state.get("config") or {}
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (config.get(key) or {}).get("enabled"):
            return dtype
    return None


def _hf_to_export(net: HFPipelineModule, stored: TensorIndex) -> ModelToExport:
    transposed = {
        f"layers.{position}.{name}"
        for position, layer in enumerate(net.meta_layers)
        for name, parameter in layer.named_parameters()
        if is_transposed(parameter)
    }
    tensors = {}
    for key in stored:
        group, _, logical = key.partition("/")
        if group in ("parameters", "buffers") and not is_adapter(logical):
            tensors[net.hf_name(logical)] = CheckpointTensor(key, transposed=logical in transposed)
    return ModelToExport(net.hf_config, net.description.class_name, tensors)


# End of the name of a class of transformers -> task type of peft.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
}


def export_adapter(reader: CheckpointReader, path: str | Path) -> int:
    """Write the adapter, for the model that `hf export` would write; return its bytes.

    The linears of the built-in GPT become the linears of GPT2 or Llama: q, k and v of Llama get the
    A of the fused linear, and their rows of its B.

    Raises:
        CheckpointError: the run had no adapter, its model is not one of transformers, or the folder
            is not empty.
    """
    section = lora_of(reader)
    if section is None:
        raise CheckpointError(
            f"{reader.full_path} has no adapter: its run had no section 'lora'; export the whole "
            f"model without --adapter"
        )
    folder = Path(path).absolute()
    refuse_existing(folder)
    exported = model_to_export(reader)
    tied = tied_names(whole_model(exported.config, exported.class_name))
    tensors: dict[str, Tensor] = {}
    for name, place in exported.tensors.items():
        a, b = adapter_of(place.key)
        if name.endswith("weight") and a in reader.tensors.tensors:
            module = name.removesuffix("weight")
            tensors[f"{module}{A}.weight"] = reader.tensors.read_full(a, None)
            tensors[f"{module}{B}.weight"] = reader.tensors.read_full(b, place.rows)
        elif _is_trained(section, place, names := tied.get(name, (name,))):
            whole = reader.tensors.read_full(place.key, place.rows)
            # peft trains the names of a tied tensor apart, unless the adapter has all of them.
            for each in names:
                tensors[each] = whole.T if place.transposed else whole
    source, temporary = source_folder(reader), folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    task = next((t for end, t in _TASKS.items() if exported.class_name.endswith(end)), None)
    save_adapter(
        temporary,
        section,
        tensors,
        fan_in_fan_out=any(place.transposed for place in exported.tensors.values()),
        base=None if source is None else str(source),
        task_type=task,
        ties=any(name in tied for name in tensors),
    )
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def _is_trained(section: LoraSection, place: CheckpointTensor, names: tuple[str, ...]) -> bool:
    """Return whether a tensor with these names belongs to a module of `lora.train_also`."""
    for own in (*names, place.key.partition("/")[2]):
        if any(f".{module}." in f".{own}" for module in section.train_also):
            return True
    return False
