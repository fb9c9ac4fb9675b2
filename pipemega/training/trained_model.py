"""Opens a trained model, from a checkpoint or a folder of transformers, to evaluate or generate.

The state_dict of a model under other names: the names in the module that `from_module` got.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from pipemega.checkpoint.save_load import CheckpointReader, open_path
from pipemega.config import Config, load
from pipemega.config.model_registry import DEFAULT_TYPE
from pipemega.config.source import override, read
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.errors import CheckpointError, ConfigError
from pipemega.models.build_model import build_model
from pipemega.pipeline.model.module import PipelineModule
from pipemega.training.evaluation_sets import model_tokenizer

# The keys of a run that also matter after it; the other ones are about its training.
_KEPT = ("seed", "imports", "model", "lora", "data")
# With several stages a batch has this many micro-batches per stage, so that few ranks are idle.
_MICRO_BATCHES = 4
_BATCH_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
}  # fmt: skip
_GPT_EMBEDDING = "parameters/layers.0.weight"
_FLOATS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ModelSource:
    """Weights of a model, and the config to build it.

    Args:
        path: path of the checkpoint, or of the folder of transformers.
        config: config of the run that saved the checkpoint, or a config made from the folder.
        reader: reader of the checkpoint; None for a folder of transformers, from which the model
            loads its weights itself.
    """

    path: str
    config: Mapping[str, Any]
    reader: CheckpointReader | None = None

    @property
    def step(self) -> int | None:
        """The number of steps that the model was trained; None: not known."""
        return None if self.reader is None else int(self.reader.found.state["global_steps"])

    def config_for(self, world_size: int, overrides: Sequence[str]) -> Config:
        """Return the config that builds the model on `world_size` ranks, without training keys.

        One rank holds the whole model. Several ranks have the pipeline and tensor sizes of the run,
        unless `overrides` set one of them.

        Args:
            overrides: "mesh.tensor=2" and the like.

        Raises:
            ConfigError: the config is not valid (any more).
        """
        stored, mesh = self.config, self.config.get("mesh") or {}
        device = mesh.get("device", "auto")
        kept = {key: stored[key] for key in _KEPT if stored.get(key) is not None}
        if "lora" in kept:
            # The checkpoint has the adapters, and their files may be gone.
            kept["lora"] = {**kept["lora"], "path": None}
        if self.reader is not None and kept["model"].get("type") == "hf":
            kept["model"] = {**kept["model"], "path": self._hf_folder, "pretrained": False}
        for key in ("fp16", "bf16"):
            kept[key] = {"enabled": (stored.get(key) or {}).get("enabled", False)}
        # For samples of different lengths.
        kept["pipeline"] = {"shapes": "exchanged"}
        # A checkpoint of GPUs can be opened on CPUs.
        kept["mesh"] = {"device": "cpu" if device == "cpu" else "auto"}
        tree = override(read(kept), overrides).tree
        if not {"pipeline", "tensor"} & tree["mesh"].keys() and world_size > 1:
            tree["mesh"] |= {key: mesh.get(key, 1) for key in ("pipeline", "tensor")}
        if not _BATCH_KEYS & tree.keys():
            pipeline = tree["mesh"].get("pipeline", 1)
            tree["train_micro_batch_size_per_gpu"] = _micro_batch_size(stored)
            tree["gradient_accumulation_steps"] = (
                _MICRO_BATCHES * pipeline if isinstance(pipeline, int) and pipeline > 1 else 1
            )
        return load(tree)

    @cached_property
    def _hf_folder(self) -> str:
        """The folder from which the run loaded its model; if it is gone, one with config.json."""
        assert self.reader is not None, "otherwise `path` is the folder"
        saved = self.reader.found.state["model"]["hf"]
        if saved["folder"] is not None and (Path(saved["folder"]) / "config.json").is_file():
            return str(saved["folder"])
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (Path(folder) / "config.json").write_text(json.dumps(saved["config"]))
        return folder

    def vocab_size(self, config: Config) -> int | None:
        """Return the vocabulary size of the model; None: it has no tokens.

        Raises:
            ConfigError: the vocabulary comes from a tokenizer, which is missing.
        """
        assert config.model is not None, "find_model has checked it"
        size = config.model.vocabulary()
        if size is None or isinstance(size, int):
            return size
        if self.reader is not None and config.model.type == DEFAULT_TYPE:
            # The tokenizer may be missing here.
            return self.reader.tensors.tensors[_GPT_EMBEDDING][0][0]
        return model_tokenizer(config)[1].vocab_size

    def load_into(self, engine: Engine) -> None:
        """Load the weights of the checkpoint; collective."""
        if self.reader is not None:
            folder, tag = self.reader.storage.full_path(), self.reader.found.tag
            engine.load_checkpoint(folder, tag, load_module_only=True)


def find_model(path: str, tag: str | None = None) -> ModelSource:
    """Find out what `path` has: checkpoints, or a model of transformers.

    Args:
        tag: tag of the checkpoint; None: the newest one.

    Raises:
        CheckpointError: there is neither of them; the checkpoint is damaged; its config does not
            describe the model.
    """
    config_file = Path(path).expanduser() / "config.json"
    if config_file.is_file():
        config = _json_object(config_file)
        # A run folder has a config.json too.
        if "model_type" in config:
            return ModelSource(str(config_file.parent), _config_of_folder(config_file, config))
    reader = open_path(path, tag)
    stored = reader.found.state["config"]
    if stored.get("model") is None and "hf" in (reader.found.state.get("model") or {}):
        # The script has called from_pretrained itself.
        stored = {**stored, "model": {"type": "hf"}}
    if stored.get("model") is None:
        raise CheckpointError(
            f"the config of {reader.full_path} has no section 'model': the script of the run has "
            f"built the model itself. Register it as a model type (docs/models.md), and train with "
            f"it; or evaluate in the script, with engine.evaluate"
        )
    return ModelSource(reader.full_path, stored, reader)


def open_model(source: ModelSource, config: Config, mesh: Mesh) -> tuple[PipelineModule, Engine]:
    """Build the model on the mesh, without an optimizer, and load its weights.  Collective.

    Raises:
        ConfigError, CheckpointError: the model cannot be built, or the weights are not its own.
    """
    model = build_model(config, mesh, source.vocab_size(config))
    engine, *_ = initialize(model, config, mesh=mesh)
    source.load_into(engine)
    return model, engine


def _config_of_folder(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that loads a folder of transformers, in the dtype of its weights."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    made: dict[str, Any] = {"model": {"type": "hf", "path": str(file.parent)}}
    if dtype in _FLOATS:
        made[_FLOATS[dtype]] = {"enabled": True}
    return made


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _micro_batch_size(stored: Mapping[str, Any]) -> int:
    """Return the micro-batch size of the run; 1 if there was no run."""
    if not _BATCH_KEYS & stored.keys():
        return 1
    kept = {key: stored[key] for key in (*_BATCH_KEYS, "mesh") if key in stored}
    config = load(kept)
    return config.batch(config.smallest_data_size).micro_batch_size


_KINDS = ("parameters/", "buffers/")


def module_state_dict(
    net: PipelineModule, source: Engine | str | Path, tag: str | None = None
) -> dict[str, Tensor]:
    """Return the state_dict of the module of `from_module`, for `module.load_state_dict`.

    A ResNet (`model.type` "resnet") has the names of torchvision's models.

    From an engine it is collective, and every rank gets all tensors. From a checkpoint of any mesh
    it runs in one process without torch.distributed.

    Args:
        net: the pipeline of the module.
        source: the engine that trains `net`, or a folder of checkpoints, or one checkpoint.
        tag: the checkpoint in the folder; None: the newest undamaged one.

    Returns:
        Name in the module -> full tensor on the CPU; with bf16 or fp16 the fp32 master weights.
        Tensors that no layer uses are missing.

    Raises:
        ConfigError: `net` has no other names.
        CheckpointError: the checkpoint cannot be read, or belongs to another model.
    """
    names = net.state_names()
    if names is None:
        raise ConfigError(
            "module_state_dict: the model was not made by PipelineModule.from_module, and is no "
            "ResNet, so its parameters have only their logical names: use engine.parameter_state()"
        )
    if isinstance(source, Engine):
        tensors = source.parameter_state() | source.buffer_state()
        return {name: tensors[logical] for name, logical in names.items()}
    reader = open_path(os.fspath(source), tag)
    stored = {
        key.partition("/")[2]: key for key in reader.tensors.tensors if key.startswith(_KINDS)
    }
    missing = [f"{logical} ({name})" for name, logical in names.items() if logical not in stored]
    if missing:
        raise CheckpointError(
            f"{reader.full_path} has no {missing[0]}, and lacks {len(missing)} of the "
            f"{len(names)} tensors of the module: it is a checkpoint of another model, or of "
            f"other layers of it; it has {', '.join(sorted(stored)[:4])}, ..."
        )
    read = {logical: reader.tensors.read_full(stored[logical]) for logical in set(names.values())}
    return {name: read[logical] for name, logical in names.items()}
