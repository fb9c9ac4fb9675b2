"""`deepspeed.initialize`: an engine for a pipeline, or for another module.

Builds the engine of a DeepSpeed PipelineModule: the config, the optimizer, pipemega's engine.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipemega.compat.deepspeed.data_parallel_engine import initialize_data_parallel
from pipemega.compat.deepspeed.deepspeed_engine import schedule_maker
from pipemega.compat.deepspeed.pipeline_engine import PipelineEngine
from pipemega.compat.deepspeed.pipeline_module import DeepSpeedNetwork, DeepSpeedPipelineModule
from pipemega.compat.deepspeed.process_topology import CONFIG_CHANGES, init_distributed
from pipemega.config import Config, load
from pipemega.config.source import override, read
from pipemega.distributed.mesh import from_first, on_all_ranks, with_timeout
from pipemega.engine.initialize import initialize as build_engine
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor import get_logger
from pipemega.optimizer.user_optimizer import (
    GivenGroups,
    GivenOptimizer,
    as_optimizer,
    freeze_others,
)
from pipemega.pipeline.model.module import BuildOptions, build_stages


def initialize_pipeline(
    *,
    model: DeepSpeedPipelineModule,
    config: Any,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[PipelineEngine, Optimizer | None, Any, Any]:
    """Build the engine of a PipelineModule; the arguments are as for `initialize`.  Collective.

    Raises:
        ConfigError: an argument or the config is not supported, or contradicts the module; the
            same on every rank.
    """
    mesh = model.mpu().mesh
    with failure_reporter().propagate_errors("initialize"):
        if mpu is not None and mpu is not model.mpu():
            raise ConfigError(
                "initialize(mpu=...) is not the mpu() of the PipelineModule, whose topology sets "
                "the ranks of each axis: remove it, and give PipelineModule(topology=...)",
                on_every_rank=True,
            )
        seed = from_first(mesh.world, torch.initial_seed) % 2**31
        changes = [f"seed={seed}"]
        if optimizer is not None:
            # The groups of the optimizer decide about weight decay.
            changes.append("training.weight_decay_norms_and_biases=true")
        checked = on_all_ranks(mesh.world, partial(pipeline_config, config, model, changes))
        mesh = with_timeout(mesh, timedelta(seconds=checked.mesh.timeout_seconds))
        net = model.network()
        parameters = list(model.parameters() if model_parameters is None else model_parameters)
        model_parameters = None if model_parameters is None else parameters
        if optimizer is not None:
            optimizer = on_all_ranks(mesh.world, partial(as_optimizer, optimizer, parameters))
        given, groups = _optimizer_arguments(optimizer, model_parameters, net, model)
    engine, *_ = build_engine(
        net,
        checked,
        mesh=mesh,
        optimizer=given,
        lr_scheduler=schedule_maker(lr_scheduler, checked.batch(mesh.data.size).train_batch_size),
        model_parameters=groups,
    )
    facade = PipelineEngine(engine, model, training_data, collate_fn)
    return facade, facade.optimizer, facade.training_dataloader, facade.lr_scheduler


def pipeline_config(
    config: Any, model: DeepSpeedPipelineModule, changes: Sequence[str] = ()
) -> Config:
    """Return the config with what the module determines: the mesh and the bounds of the stages.

    Args:
        changes: further keys, as KEY=VALUE; a seed is used if the config has none.

    Raises:
        ConfigError: a key contradicts the module, or asks for several stages per rank.
    """
    given = config.to_dict() if isinstance(config, Config) else config
    tree = override(read(given), CONFIG_CHANGES).tree
    tree = tree if isinstance(tree, Mapping) else {}
    place = model.mpu().mesh.topology
    for axis in ("pipeline", "data", "tensor"):
        given, here = _key(tree, "mesh", axis), place.size(axis)
        if given not in (None, "auto", here):
            raise ConfigError(
                f"mesh.{axis} is {given} in the config, and the topology of the PipelineModule has "
                f"{here}: remove the key, or change num_stages or topology",
                on_every_rank=True,
            )
    if "seed" in tree:
        changes = [change for change in changes if not change.startswith("seed=")]
    overrides = [*CONFIG_CHANGES, *_overrides(tree, model), *changes]
    # The bounds of the module do not fit a schedule with several stages per rank.
    checked = load(config, [*overrides, 'pipeline.partition="parameters"'], adopt=True)
    chunks = checked.pipeline.stages_per_rank
    if chunks not in (None, 1):
        raise ConfigError(
            f"pipeline.schedule {checked.pipeline.schedule!r} has {chunks} stages per rank, and a "
            "PipelineModule of DeepSpeed builds the layers of one stage: use a schedule with one, "
            "such as '1f1b' or 'zb-h1', or pipemega.PipelineModule",
            on_every_rank=True,
        )
    bounds = f"pipeline.partition={json.dumps(model.parts)}"
    return load(config, [*overrides, bounds], adopt=True)


def _overrides(tree: Mapping[str, Any], model: DeepSpeedPipelineModule) -> Iterator[str]:
    """Yield the keys that the module determines, and defaults of DeepSpeed, as KEY=VALUE."""
    place = model.mpu().mesh.topology
    yield f"mesh.pipeline={place.pipeline}"
    yield f"mesh.data={place.data}"
    yield f"mesh.tensor={place.tensor}"
    yield "pipeline.seed_layers=false"
    # DeepSpeed's order of precedence: the JSON file, if it sets the interval.
    if not _key(tree, "pipeline", "activation_checkpoint_interval"):
        interval = model.activation_checkpoint_interval
        yield f"pipeline.activation_checkpoint_interval={interval}"
    if model.dynamic_shape and _key(tree, "pipeline", "shapes") is None:
        yield 'pipeline.shapes="exchanged"'
    allowed = _key(tree, "checkpoint", "allow_changes") or []
    if "seed" not in tree and isinstance(allowed, list):
        # torch draws one in each process of a script that sets none; the data do not depend on it.
        yield f"checkpoint.allow_changes={json.dumps([*allowed, 'seed'])}"


def _key(tree: Mapping[str, Any], section: str, name: str) -> Any:
    found = tree.get(section)
    return found.get(name) if isinstance(found, Mapping) else None


def _local_parameters(
    net: DeepSpeedNetwork, model: DeepSpeedPipelineModule
) -> dict[str, nn.Parameter]:
    """Return logical name -> parameter of this rank."""
    mesh = model.mpu().mesh
    options = BuildOptions(mesh.tensor, mesh.device, seed=0)
    (stage,) = build_stages(net, model.parts, [model.stage_id], options).values()
    return stage.logical_names()


def _names(net: DeepSpeedNetwork, local: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Return id -> logical name of the parameters that exist on this rank.

    An optimizer may hold parameters of other stages too, if the user has built the whole model.
    """
    built = {
        id(parameter): f"layers.{position}.{name}"
        for position, spec in enumerate(net.specs)
        if spec.already_built
        for name, parameter in net.meta_layers[position].named_parameters()
    }
    return built | {id(parameter): name for name, parameter in local.items()}


def _optimizer_arguments(
    optimizer: Optimizer | None,
    model_parameters: Any,
    net: DeepSpeedNetwork,
    model: DeepSpeedPipelineModule,
) -> tuple[GivenOptimizer | None, GivenGroups | None]:
    """Return the arguments optimizer and model_parameters of pipemega's initialize."""
    local = _local_parameters(net, model)
    names, world = _names(net, local), model.mpu().mesh.world
    log = get_logger(world.rank)
    if optimizer is not None:
        given = on_all_ranks(world, lambda: GivenOptimizer(optimizer, names))
        freeze_others(local, given.groups, log)
        return given, None
    if model_parameters is None:
        return None, None
    groups = on_all_ranks(world, lambda: GivenGroups(model_parameters, names))
    freeze_others(local, groups, log)
    has_groups = any(isinstance(entry, Mapping) for entry in model_parameters)
    return None, groups if has_groups else None


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
    named = getattr(args, "deepspeed_config", None)
    if named is None:
        named = getattr(args, "deepscale_config", None)
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
