"""from_pretrained: a Hugging Face folder or config -> HFPipelineModule."""

import copy
import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.installed_transformers import import_transformers
from pipemega.hf.refusals import refuse_unknown_family
from pipemega.hf.safetensors_source import SafetensorsSource
from pipemega.hf.tasks import model_class_of
from pipemega.hf.weight_source import WeightSource


def from_pretrained(
    path_or_config: Any,
    *,
    task: str | None = None,
    pretrained: bool = True,
    sequence_parallel: bool = False,
    attn_implementation: str | None = None,
    num_labels: int | None = None,
    loss_fn: Any = None,
) -> HFPipelineModule:
    """Return a Hugging Face model as layers; nothing is downloaded, no remote code runs.

    Args:
        path_or_config: a folder with config.json and safetensors, or a `PretrainedConfig`.
        task: a key of `pipemega.hf.tasks.TASKS`, such as "causal-lm"; by default that of the
            config's `architectures`.
        pretrained: load the weights of the folder; False: initialise as HF does.
        sequence_parallel: shard activations between the layers over the sequence
            (`mesh.sequence_parallel`).
        attn_implementation: "eager", "sdpa", "flash_attention_2"...; by default HF's choice.
        num_labels: number of classes of a classification task; by default that of the config.
        loss_fn: maps (output, labels) to the loss, as for `PipelineModule`; by default that of the
            task. The output is the logits; of SAM it is (pred_masks, iou_scores).

    Raises:
        ConfigError: names the folder, the key or the version, and the way out; the same on every
            rank.
    """
    folder, config = read_config(path_or_config)
    if pretrained and folder is None:
        raise ConfigError(
            "from_pretrained() got a config, which has no weights: give the folder of the "
            "weights, or pretrained=False to initialise the model",
            on_every_rank=True,
        )
    config = copy.deepcopy(config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    if num_labels is not None:
        config.num_labels = num_labels
    description = ModelDescription(
        config, model_class_of(config, task), sequence_parallel=sequence_parallel
    )
    source: WeightSource | None = None
    if pretrained:
        assert folder is not None
        source = SafetensorsSource(folder, description.config, description.class_name)
    return HFPipelineModule(description, source, folder, loss_fn)


def read_config(path_or_config: Any) -> tuple[Path | None, Any]:
    """Return (folder, PretrainedConfig)."""
    transformers = import_transformers()
    if isinstance(path_or_config, transformers.PretrainedConfig):
        return None, path_or_config
    if not isinstance(path_or_config, str | os.PathLike):
        raise ConfigError(
            f"from_pretrained() takes a folder or a PretrainedConfig, not "
            f"{type(path_or_config).__name__}",
            on_every_rank=True,
        )
    folder = Path(path_or_config)
    _check_config_file(folder, transformers.CONFIG_MAPPING)
    return folder, transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def _check_config_file(folder: Path, families: Container[str]) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no config.json: give the folder of a model as save_pretrained writes "
            f"it; nothing is downloaded",
            on_every_rank=True,
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}", on_every_rank=True) from error
    refuse_unknown_family(folder, content, families)
