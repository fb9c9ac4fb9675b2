"""`initialize`: builds an engine from a config and a model.

Set glibc's allocator to keep freed memory: the next micro-batch needs it again.

By default glibc returns the top of the heap to the kernel when it is freed, which happens after
every backward pass, and gets the same pages again in the next forward, with one page fault each.
On GPUs torch's caching allocator keeps freed memory too.

How a run starts: from its own checkpoint, from another run's checkpoint, or at step 0.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from pipemega.checkpoint import newest
from pipemega.checkpoint.checkpointer import with_values_of
from pipemega.checkpoint.layout import find_foreign
from pipemega.checkpoint.save_load import open_path
from pipemega.config import Batch, Config, load
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh, from_first, on_all_ranks, set_world_timeout
from pipemega.distributed.topology import Topology, register_exit_hook
from pipemega.engine.engine import Engine
from pipemega.engine.engine_parts import FirstPlan, LateChoice, build_components, first_plan
from pipemega.engine.plan_choice import with_chosen_vocabulary
from pipemega.engine.run.run_arguments import (
    build_mesh_of,
    check_arguments,
    open_log,
    optimizer_arguments,
    refuse_worker_process,
    use_deterministic_algorithms,
    with_devices_of_layers,
)
from pipemega.engine.run.training_data import training_loader
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.running_statistics import running_statistics_warning
from pipemega.engine.step_runner import StepRunner
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.layer_costs.stage_costs import Sample
from pipemega.lazy_imports import load_name
from pipemega.monitor import get_logger
from pipemega.optimizer import LRSchedule
from pipemega.optimizer.lr_schedules import SchedulerMaker
from pipemega.optimizer.user_optimizer import GivenGroups, GivenOptimizer, OptimizerMaker
from pipemega.pipeline.model.fp8_linears import load_fp8
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import LocalModel, log_stages, make_replicas_equal
from pipemega.pipeline.plan.instructions import Plan
from pipemega.tensor_parallel.overlapped_products import with_overlap


def resume(engine: Engine, log: logging.Logger) -> None:
    """Load the checkpoint that the config asks for, if any; collective.

    With `training.resume: "auto"` this is the newest complete checkpoint in `checkpoint.save`, so
    that the same command continues a run. Otherwise, or if there is none, it is `checkpoint.load`.
    """
    config = engine.config.checkpoint
    if engine.config.training.resume == "auto":
        assert config.save is not None, "the config has been checked"
        folder = config.save
        tag = from_first(engine.mesh.world, lambda: newest(folder))
        if tag is not None:
            log.info(f"training.resume 'auto': resuming from {tag} in {folder}")
            _load(engine, folder, None, {}, log)
            return
        start = f"loading checkpoint.load ({config.load})" if config.load else "starting a new run"
        log.info(f"training.resume 'auto': {folder} has no complete checkpoint; {start}")
    if config.load is not None:
        options = {
            "load_module_only": config.load_module_only,
            "load_optimizer_states": config.load_optimizer_states,
            "load_lr_scheduler_states": config.load_lr_scheduler_states,
            "strict": config.strict,
        }
        _load(engine, config.load, config.load_tag, options, log)


def with_saved_schedule(config: Config, mesh: Mesh, log: logging.Logger) -> Config:
    """Apply `checkpoint.use_checkpoint_opt_param_scheduler`; collective.

    Raises:
        CheckpointError: the checkpoint that the run continues is damaged.
    """
    if not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config

    def read() -> tuple[str, dict[str, Any]] | None:
        source = _source(config)
        reader = None if source is None else open_path(*source)
        return None if reader is None else (reader.full_path, reader.found.state)

    found = from_first(mesh.world, read)
    if found is None:
        return config
    path, state = found
    log.info(f"learning rate, its schedule and weight decay are those of {path}")
    return with_values_of(config, state["config"], Topology.from_text(state["mesh"]).data)


def _source(config: Config) -> tuple[str, str | None] | None:
    """Return the folder and the tag of the checkpoint that `resume` loads; not collective."""
    settings = config.checkpoint
    own = settings.save if config.training.resume == "auto" else None
    if own is not None and (tag := newest(own)) is not None:
        return own, tag
    if settings.load is None or settings.load_module_only:
        return None
    if find_foreign(settings.load, settings.load_tag) is not None:
        return None  # only its weights are loaded
    return settings.load, settings.load_tag


def _load(
    engine: Engine,
    folder: str,
    tag: str | None,
    options: dict[str, bool],
    log: logging.Logger,
) -> None:
    path, _ = engine.load_checkpoint(folder, tag, **options)
    log.info(f"resumed from {path} at step {engine.global_steps}")


# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process; return False if the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Both: setting one threshold switches off the dynamic adjustment of the other.
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _NEVER))


def initialize(
    model: PipelineModule,
    config: str | Path | Mapping[str, Any] | Config,
    training_data: Any = None,
    *,
    overrides: Sequence[str] = (),
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    example: tuple[Any, Any] | None = None,
    optimizer: OptimizerMaker | GivenOptimizer | None = None,
    lr_scheduler: SchedulerMaker | None = None,
    model_parameters: Sequence[Mapping[str, Any]] | GivenGroups | None = None,
    **unsupported: Any,
) -> tuple[Engine, Optimizer | None, BatchLoader | None, LRSchedule | None]:
    """Build this rank's stages of `model`, and the engine that trains them.  Collective.

    Works under torchrun, in a process group that the caller has created, and in a single process.
    The engine starts from the checkpoint of `training.resume` or `checkpoint.load`, if any.

    Args:
        model: describes the layers; only the local stages are built.
        config: a path, a mapping of the same structure, or a Config.
        training_data: a dataset of (inputs, labels) samples, or a torch DataLoader whose batches
            are the micro-batches of this data rank; without it `train_batch` needs an iterator over
            micro-batches. See docs/data.md.
        overrides: "pipeline.schedule=gpipe" and the like; they replace keys of the config.
        collate_fn: list of samples -> (inputs, labels) of a micro-batch.
        mesh: if the caller has built it already.
        plan: what each pipeline rank computes in a step, instead of pipeline.schedule; the same
            on every rank.
        example: (inputs, labels) of a micro-batch; only shapes and dtypes are used, so the tensors
            may be on the meta device. It decides on plan and stages if no map-style
            `training_data` is given; without it the first `train_batch` decides, and moves the
            layers.
        optimizer: list of parameter groups -> torch optimizer over these parameters, the masters
            of this rank: `lambda params: Lion(params, lr=1e-4)`. In place of the config section
            `optimizer`. It may be called several times, with small parameters, to test whether
            the optimizer works on this mesh. See docs/optimizer.md.
        lr_scheduler: optimizer -> scheduler of torch.optim.lr_scheduler, in place of the type of
            the section `scheduler`. `scheduler.by` is "step" or "epoch".
        model_parameters: groups of parameters with options of their own, in place of
            `optimizer.groups`: [{"params": "norm|bias", "weight_decay": 0.0}].
        unsupported: refused; for DeepSpeed's arguments the error names the config key to use.

    Returns:
        (engine, optimizer, loader, lr_scheduler); None for what the config does not use.

    Raises:
        ConfigError: the config is invalid, or does not fit the model or the data; `model` is not a
            PipelineModule; the optimizer or the scheduler cannot train this model on this mesh.
        MeshError: the number of launched ranks does not fit the mesh.
    """
    refuse_worker_process()
    check_arguments(model, training_data, example, unsupported)
    arguments = optimizer_arguments(optimizer, lr_scheduler, model_parameters)
    config = with_devices_of_layers(load(config, overrides), model, mesh, plan)
    sample = None if example is None else Sample.like(*example)
    setup = RunSetup(config, mesh or build_mesh_of(config), model, arguments, example=sample)
    engine = build_engine(setup, plan, training_data, collate_fn)
    return engine, engine.optimizer, engine.loader, engine.lr_scheduler


def build_engine(
    setup: RunSetup,
    plan: Plan | None = None,
    data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Engine:
    """Build an engine, and load the checkpoint that the config names.  Collective.

    Args:
        setup: the setup of the run, without a loader; its config and model are not final.
        plan, data, collate_fn: as for `initialize`.
        options: further arguments of `StepRunner`.
    """
    config, mesh, net = setup.config, setup.mesh, setup.net
    with failure_reporter().propagate_errors("initialize"):
        open_log(config, mesh)
        log = get_logger(mesh.rank)
        use_deterministic_algorithms(config, mesh.device, log)
        batch = setup.batch
        config = with_saved_schedule(config, mesh, log)
        for name in _transforms(config):
            config, net = load_name(f"{name}:transform_model")(config, net, mesh)
        _log_config(config, batch, mesh)
        loader = None
        if data is not None:
            loader = training_loader(config, mesh, data, collate_fn, config.training.epochs)
        fp8 = None
        if config.fp8.enabled and setup.arguments.trains(config):
            fp8 = on_all_ranks(mesh.world, partial(load_fp8, config.fp8, mesh.device))
        if config.mesh.overlaps_products(mesh.device.type):
            mesh = replace(mesh, tensor=with_overlap(mesh.tensor, mesh.device, log))
        setup = replace(setup, config=config, mesh=mesh, net=net, loader=loader, fp8=fp8)
        engine = Engine(_build_steps(setup, plan, options))
        if mesh.world.size > 1:
            # If a rank could not build its part, all ranks stop here and not in the first step.
            dist.barrier(mesh.world.group)
            set_world_timeout(mesh)
    resume(engine, get_logger(mesh.rank))
    register_exit_hook(engine.close)
    return engine


def _build_steps(
    setup: RunSetup, given_plan: Plan | None, options: Mapping[str, Any]
) -> StepRunner:
    """Choose the plan, and build the stages of this rank and what trains them; collective."""
    mesh = setup.mesh
    if mesh.device.type == "cpu" and setup.config.mesh.keep_cpu_memory:
        keep_freed_memory()
    setup = with_chosen_vocabulary(setup, given_plan)
    first = first_plan(setup, given_plan)
    late_choice = LateChoice(setup, given_plan) if first.is_provisional else None
    model = _build_stages(setup, first)
    components = build_components(setup, model, first, late_choice)
    return StepRunner(setup.config, mesh, components, **options)


# Section of the config -> the module that changes the model, if the section is set.
_TRANSFORMS = {"lora": "pipemega.lora.adapters"}


def _transforms(config: Config) -> list[str]:
    return [module for key, module in _TRANSFORMS.items() if getattr(config, key) is not None]


def _build_stages(setup: RunSetup, first: FirstPlan) -> LocalModel:
    """Build the stages of this rank with their first values; collective."""
    net, log = setup.net, get_logger(setup.mesh.rank)
    place = first.plan.rank_of_stage
    model = setup.build_stages(first.bounds, place)
    for name in _transforms(setup.config):
        load_name(f"{name}:load_values")(setup.config, net, model)
    make_replicas_equal(net, setup.mesh, model)
    if setup.trains:
        _warn_of_running_statistics(setup)
    whole = net if setup.cuts_vocabulary else None
    log_stages(log, setup.staged_net, first.bounds, place, whole)
    log.info(setup.batch.equation)
    return model


def _warn_of_running_statistics(setup: RunSetup) -> None:
    """Log the warning about BatchNorm and similar layers once.

    Raises:
        ConfigError: as `running_statistics_warning`; on every rank.
    """
    recomputes = setup.build_options.checkpoint_interval > 0
    warning = running_statistics_warning(
        setup.net, setup.config, setup.batch, checkpointing=recomputes
    )
    if warning is not None and setup.mesh.rank == 0:
        get_logger().warning(warning)


def _log_config(config: Config, batch: Batch, mesh: Mesh) -> None:
    """Log, once, the warnings and notes about the config."""
    log = get_logger(mesh.rank)
    for note in config.notes:
        log.info(note)
    if mesh.rank == 0:
        for warning in (*config.warnings, *batch.warnings):
            log.warning(warning)
        for note in config.zero_notes(mesh.data.size):
            log.info(note)
        on_cpus = mesh.device.type == "cpu" and not mesh.pipeline.devices
        if config.zero_optimization.offloads and on_cpus:
            log.info(
                "zero_optimization.offload_optimizer.device 'cpu': the model is on the CPU, so "
                "nothing is moved"
            )
    if config.dump_state:
        log.info(config.to_json())
