"""pipemega: large transformers over data, tensor and pipeline ranks, from one JSON file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipemega.assemble import build_mesh_of as build_mesh
    from pipemega.assemble import initialize
    from pipemega.config import Config
    from pipemega.config import load as load_config
    from pipemega.engine import Engine
    from pipemega.errors import PipemegaError
    from pipemega.launch import run
    from pipemega.pipeline.module import PipelineModule
    from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec, TiedLayerSpec

__version__ = "0.1.0"

__all__ = [
    "TENSOR_AXIS",
    "Config",
    "Engine",
    "LayerSpec",
    "PipelineModule",
    "PipemegaError",
    "TiedLayerSpec",
    "build_mesh",
    "initialize",
    "load_config",
    "run",
]

_HOMES = {
    "TENSOR_AXIS": ("pipemega.pipeline.spec", "TENSOR_AXIS"),
    "Config": ("pipemega.config", "Config"),
    "Engine": ("pipemega.engine", "Engine"),
    "LayerSpec": ("pipemega.pipeline.spec", "LayerSpec"),
    "PipelineModule": ("pipemega.pipeline.module", "PipelineModule"),
    "PipemegaError": ("pipemega.errors", "PipemegaError"),
    "TiedLayerSpec": ("pipemega.pipeline.spec", "TiedLayerSpec"),
    "build_mesh": ("pipemega.assemble", "build_mesh_of"),
    "initialize": ("pipemega.assemble", "initialize"),
    "load_config": ("pipemega.config", "load"),
    "run": ("pipemega.launch", "run"),
}


def __getattr__(name: str) -> Any:
    # Looked up when first used: the command line, which is this package too, needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'pipemega' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
