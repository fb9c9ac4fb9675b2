"""`deepspeed.zero`: without ZeRO stage 3 parameters are whole on each rank."""

from contextlib import nullcontext
from enum import Enum
from typing import Any

from pipemega.errors import ConfigError


class Init(nullcontext[None]):
    """Refuses to cut the parameters of a model over the data ranks while it is built.

    Args:
        enabled: False: the block changes nothing.

    Raises:
        ConfigError: `enabled` is true.
    """

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            raise ConfigError(
                "zero.Init() cuts parameters over the data ranks (ZeRO stage 3), which does not "
                "exist here: build the model without it. If the model does not fit into the memory "
                "of a rank, write it as a PipelineModule of LayerSpecs, of which each rank builds "
                "only its layers; or use torch's fully_shard without this package"
            )
        super().__init__()


class GatheredParameters(nullcontext[None]):
    """Does nothing: parameters are whole on each rank.

    The arguments are those of DeepSpeed.
    """

    def __init__(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Do nothing: parameters are whole on each rank."""


def unregister_external_parameter(module: Any, parameter: Any) -> None:
    """Do nothing: parameters are whole on each rank."""


def set_z3_leaf_modules(model: Any, leaf_module_classes: Any) -> list[Any]:
    """Return []: parameters are whole on each rank, so no module is marked."""
    return []


class ZeroParamStatus(Enum):
    """The states of a parameter of ZeRO stage 3; no parameter has the attribute `ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
