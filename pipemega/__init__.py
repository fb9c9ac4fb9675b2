"""pipemega: large transformers over data, tensor and pipeline ranks, from one JSON file."""

from typing import TYPE_CHECKING, Any

from pipemega.cuda_settings import set_defaults
from pipemega.lazy_imports import __version__ as __version__
from pipemega.lazy_imports import import_first

if TYPE_CHECKING:
    from pipemega.config import Config
    from pipemega.config import load as load_config
    from pipemega.config.builder import add_arguments
    from pipemega.config.model_registry import register_model
    from pipemega.data.finetuning.finetuning_dataset import finetuning_dataset
    from pipemega.engine.engine import Engine
    from pipemega.engine.initialize import initialize
    from pipemega.engine.run.run_arguments import build_mesh_of as build_mesh
    from pipemega.engine.run.run_arguments import rank_logger
    from pipemega.errors import PipemegaError, StopTraining
    from pipemega.fault_tolerance.run import run
    from pipemega.hf.hf_module import from_pretrained
    from pipemega.models.build_model import ModelContext, build_model
    from pipemega.monitor import MultiTimer
    from pipemega.pipeline.microbatch_loss import WeightedLoss
    from pipemega.pipeline.model.batch_norm import DeferredBatchNorm
    from pipemega.pipeline.model.module import PipelineModule
    from pipemega.pipeline.model.spec import EXPERT_AXIS, TENSOR_AXIS, LayerSpec, TiedLayerSpec
    from pipemega.pipeline.tracing.from_module import SPLIT
    from pipemega.training import Trainer, pretrain
    from pipemega.training.trained_model import module_state_dict

set_defaults()

__all__ = [
    "EXPERT_AXIS",
    "SPLIT",
    "TENSOR_AXIS",
    "Config",
    "DeferredBatchNorm",
    "Engine",
    "LayerSpec",
    "ModelContext",
    "MultiTimer",
    "PipelineModule",
    "PipemegaError",
    "StopTraining",
    "TiedLayerSpec",
    "Trainer",
    "WeightedLoss",
    "add_arguments",
    "build_mesh",
    "build_model",
    "finetuning_dataset",
    "from_pretrained",
    "initialize",
    "load_config",
    "module_state_dict",
    "pretrain",
    "rank_logger",
    "register_model",
    "run",
]

_MODULE_AND_NAME = {
    "SPLIT": ("pipemega.pipeline.tracing.from_module", "SPLIT"),
    "EXPERT_AXIS": ("pipemega.pipeline.model.spec", "EXPERT_AXIS"),
    "TENSOR_AXIS": ("pipemega.pipeline.model.spec", "TENSOR_AXIS"),
    "Config": ("pipemega.config", "Config"),
    "DeferredBatchNorm": ("pipemega.pipeline.model.batch_norm", "DeferredBatchNorm"),
    "Engine": ("pipemega.engine.engine", "Engine"),
    "LayerSpec": ("pipemega.pipeline.model.spec", "LayerSpec"),
    "ModelContext": ("pipemega.models.build_model", "ModelContext"),
    "MultiTimer": ("pipemega.monitor", "MultiTimer"),
    "PipelineModule": ("pipemega.pipeline.model.module", "PipelineModule"),
    "PipemegaError": ("pipemega.errors", "PipemegaError"),
    "StopTraining": ("pipemega.errors", "StopTraining"),
    "TiedLayerSpec": ("pipemega.pipeline.model.spec", "TiedLayerSpec"),
    "Trainer": ("pipemega.training", "Trainer"),
    "WeightedLoss": ("pipemega.pipeline.microbatch_loss", "WeightedLoss"),
    "add_arguments": ("pipemega.config.builder", "add_arguments"),
    "build_mesh": ("pipemega.engine.run.run_arguments", "build_mesh_of"),
    "build_model": ("pipemega.models.build_model", "build_model"),
    "finetuning_dataset": (
        "pipemega.data.finetuning.finetuning_dataset",
        "finetuning_dataset",
    ),
    "from_pretrained": ("pipemega.hf.hf_module", "from_pretrained"),
    "initialize": ("pipemega.engine.initialize", "initialize"),
    "load_config": ("pipemega.config", "load"),
    "module_state_dict": ("pipemega.training.trained_model", "module_state_dict"),
    "pretrain": ("pipemega.training.pretrain", ""),
    "rank_logger": ("pipemega.engine.run.run_arguments", "rank_logger"),
    "register_model": ("pipemega.config.model_registry", "register_model"),
    "run": ("pipemega.fault_tolerance.run", "run"),
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line imports this package too and needs no torch.
    if name not in _MODULE_AND_NAME:
        raise AttributeError(f"module 'pipemega' has no attribute {name!r}")
    path, attribute = _MODULE_AND_NAME[name]
    module = import_first(path)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
