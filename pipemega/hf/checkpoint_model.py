"""The model in a checkpoint, as a model of transformers that can be exported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipemega.checkpoint.dcp_storage import TensorIndex
from pipemega.checkpoint.save_load import CheckpointReader
from pipemega.config.model import GPTSection
from pipemega.errors import CheckpointError
from pipemega.hf.export import CheckpointTensor, ModelToExport
from pipemega.hf.gpt_export import gpt_to_export
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.load_model import from_pretrained
from pipemega.hf.weight_source import is_transposed


def model_to_export(reader: CheckpointReader) -> ModelToExport:
    """Return the model that a checkpoint contains.

    Raises:
        CheckpointError: it has neither a model of transformers nor our own GPT.
    """
    state, stored = reader.found.state, reader.tensors.tensors
    saved = state.get("model", {}).get("hf")
    if saved is not None:
        return _hf_to_export(module_of(saved), stored)
    section = (state.get("config") or {}).get("model") or {}
    if section.get("type", "gpt") != "gpt" or "num_layers" not in section:
        kind = repr(section.get("type")) if section else "none: the script built the model itself"
        raise CheckpointError(
            f"{reader.full_path} contains no model that transformers has: model.type is {kind}; "
            f"models of type 'hf' and 'gpt' can be exported"
        )
    (vocab_size, _), _ = stored["parameters/layers.0.weight"]
    return gpt_to_export(GPTSection.model_validate(section), vocab_size)


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
    """Return the half precision in which the run computed; None: that of the stored tensors."""
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
        if group in ("parameters", "buffers"):
            tensors[net.hf_name(logical)] = CheckpointTensor(key, transposed=logical in transposed)
    return ModelToExport(net.hf_config, net.description.class_name, tensors)
