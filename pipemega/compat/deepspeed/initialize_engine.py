"""`deepspeed.initialize`: an engine for a pipeline, or for another module."""

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipemega.compat.deepspeed.data_parallel_engine import initialize_data_parallel
from pipemega.compat.deepspeed.initialize_pipeline import initialize_pipeline
from pipemega.compat.deepspeed.launch_calls import init_distributed
from pipemega.compat.deepspeed.pipeline_module import DeepSpeedPipelineModule
from pipemega.errors import ConfigError


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Build an engine, as `deepspeed.initialize` does.  Collective.

    Args:
        args: has `deepspeed_config`, the path of the JSON file, unless `config` is given.
        model: a PipelineModule of this package; any other nn.Module is trained data-parallel.
        optimizer: a torch optimizer over (some of) the model's parameters, or a function of
            `model_parameters` that returns one; in place of the section `optimizer`.
        model_parameters: parameters or groups of them; None: all that require a gradient.
        training_data: a dataset of (inputs, labels).
        lr_scheduler: over the optimizer, or a function of it; in place of the section `scheduler`.
        distributed_port, dist_init_required: as for `init_distributed`.
        mpu: the `model.mpu()` of a pipeline; or an object with the sizes of the ranks' groups.
        collate_fn: list of samples -> micro-batch.
        config, config_params: a path, a mapping, or the JSON text.
        mesh_param: refused.

    Returns:
        (engine, optimizer, training dataloader, lr_scheduler); None for what there is not.

    Raises:
        ConfigError: an argument or the config is not supported; says what to use.
    """
    if model is None:
        raise ConfigError("initialize() needs a model", on_every_rank=True)
    if mesh_param is not None:
        raise ConfigError(
            "initialize(mesh_param=...) is for DeepSpeed's sequence parallelism, which does not "
            "exist here: set mesh.tensor and mesh.sequence_parallel in the config",
            on_every_rank=True,
        )
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    build = initialize_pipeline if is_pipeline else initialize_data_parallel
    return build(
        model=model,
        config=merged_config(args, config, config_params),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
    )


def merged_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the config that one of the three arguments gives: a path, a mapping or a text.

    Raises:
        ConfigError: none of them gives one, or two do.
    """
    if config is None:
        config = config_params
    named = next(
        (
            getattr(args, name)
            for name in ("deepspeed_config", "deepscale_config")
            if getattr(args, name, None) is not None
        ),
        None,
    )
    if config is None and named is None:
        raise ConfigError(
            "initialize() has no config: give config= (a path or a dict), or the option "
            "--deepspeed_config FILE, which add_config_arguments() adds",
            on_every_rank=True,
        )
    if config is not None and named is not None:
        raise ConfigError(
            f"initialize() got a config and args.deepspeed_config ({named}): keep one",
            on_every_rank=True,
        )
    return _decoded(config if config is not None else named)


def _decoded(config: Any) -> Any:
    """Return the JSON text of a base64 string, and any other config as it is."""
    if not isinstance(config, str) or config.lstrip().startswith("{") or Path(config).exists():
        return dict(config) if isinstance(config, Mapping) else config
    try:
        text = base64.urlsafe_b64decode(config).decode()
    except (binascii.Error, ValueError):
        return config
    return text if text.lstrip().startswith("{") else config
