"""`initialize`: builds an engine from a config and a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipemega.config import Batch, Config, load
from pipemega.data.loader import BatchLoader
from pipemega.distributed.exit_hooks import register_exit_hook
from pipemega.distributed.mesh import Mesh, from_first, on_all_ranks, set_world_timeout
from pipemega.engine.build_loader import training_loader
from pipemega.engine.check_arguments import check_arguments, optimizer_arguments
from pipemega.engine.components import build_components
from pipemega.engine.cpu_allocator import keep_freed_memory
from pipemega.engine.determinism import use_deterministic_algorithms
from pipemega.engine.engine import Engine
from pipemega.engine.loop_engine import LoopEngine
from pipemega.engine.plan_choice import ChosenPlan, PlanChooser
from pipemega.engine.rank_logging import open_log
from pipemega.engine.resume import resume, with_saved_schedule
from pipemega.engine.run_mesh import (
    build_mesh_of,
    refuse_worker_process,
    with_devices_of_layers,
)
from pipemega.engine.running_statistics import running_statistics_warning
from pipemega.engine.schedule_tuner import ScheduleTuner, first_tuned_plan
from pipemega.engine.stage_mover import StageMover
from pipemega.engine.step_plans import StepPlans
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.lora.adapted_model import add_lora
from pipemega.lora.peft_files import load_adapter, section_of
from pipemega.monitor import get_logger
from pipemega.optimizer import LRSchedule
from pipemega.optimizer.build_step import OptimizerArguments
from pipemega.optimizer.given_optimizer import GivenGroups, GivenOptimizer
from pipemega.optimizer.torch_schedule import SchedulerMaker
from pipemega.optimizer.user_optimizer import OptimizerMaker
from pipemega.pipeline.local_model import build_local_model, log_stages, make_replicas_equal
from pipemega.pipeline.module import BuildOptions, PipelineModule
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan_selection import plan_is_provisional
from pipemega.pipeline.recompute import checkpoint_interval
from pipemega.pipeline.stage_partition import stage_bounds
from pipemega.pipeline.vocabulary_shard import vocabulary_split
from pipemega.planning.vocabulary_choice import with_cut_vocabulary

AnyEngine = TypeVar("AnyEngine", bound=Engine)


def initialize(
    model: PipelineModule,
    config: str | Path | Mapping[str, Any] | Config,
    training_data: Any = None,
    *,
    overrides: Sequence[str] = (),
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
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
    check_arguments(model, training_data, unsupported)
    arguments = optimizer_arguments(optimizer, lr_scheduler, model_parameters)
    data = training_data, collate_fn
    engine = _initialize(Engine, model, load(config, overrides), data, mesh, plan, arguments)
    return engine, engine.optimizer, engine.loader, engine.lr_scheduler


def initialize_loop(
    module: nn.Module,
    config: Config,
    *,
    mesh: Mesh | None = None,
    optimizer: OptimizerMaker | GivenOptimizer | None = None,
    lr_scheduler: SchedulerMaker | None = None,
    model_parameters: Sequence[Mapping[str, Any]] | GivenGroups | None = None,
) -> LoopEngine:
    """Build the engine of a loop that runs the forward and backward of `module`.  Collective.

    The arguments are those of `initialize`. A parameter `x` has the logical name `layers.0.x`.

    Raises:
        ConfigError, MeshError: as `initialize`; or a key has no meaning in such a loop.
    """
    arguments = optimizer_arguments(optimizer, lr_scheduler, model_parameters)
    mesh = mesh or build_mesh_of(config)
    for axis in (mesh.pipeline, mesh.tensor):
        if axis.size > 1:
            raise ConfigError(
                f"mesh.{axis.name} is {axis.size}, and {type(module).__name__} is no pipeline, so "
                f"each rank needs all of it: set mesh.{axis.name} to 1, or write the model as a "
                "PipelineModule of its layers",
                on_every_rank=True,
            )
    net = PipelineModule([module])
    return _initialize(LoopEngine, net, config, (None, None), mesh, None, arguments)


def _initialize(
    engine_class: type[AnyEngine],
    model: PipelineModule,
    config: Config,
    data: tuple[Any, Callable[[list[Any]], Any] | None],
    mesh: Mesh | None,
    plan: Plan | None,
    arguments: OptimizerArguments,
) -> AnyEngine:
    """Build an engine, and load the checkpoint that the config names.  Collective.

    Args:
        data: the training data, and its collate_fn.
    """
    config = with_devices_of_layers(config, model, mesh, plan)
    mesh = mesh or build_mesh_of(config)
    with failure_reporter().propagate_errors("initialize"):
        open_log(config, mesh)
        use_deterministic_algorithms(config, mesh.device, get_logger(mesh.rank))
        batch = config.batch(mesh.data.size)
        config = with_saved_schedule(config, mesh, get_logger(mesh.rank))
        if config.lora is not None:
            lora = on_all_ranks(mesh.world, partial(section_of, config.lora))
            config = config.model_copy(update={"lora": lora})
            model = add_lora(model, lora)
        _log_config(config, batch, mesh)
        loader = None
        if data[0] is not None:
            loader = training_loader(config, mesh, *data, config.training.epochs)
        engine = _build_engine(engine_class, model, config, mesh, batch, loader, plan, arguments)
        if mesh.world.size > 1:
            # If a rank could not build its part, all ranks stop here and not in the first step.
            dist.barrier(mesh.world.group)
            set_world_timeout(mesh)
    log = get_logger(mesh.rank)
    resume(engine, log)
    register_exit_hook(engine.close)
    return engine


def _build_engine(
    engine_class: type[AnyEngine],
    model: PipelineModule,
    config: Config,
    mesh: Mesh,
    batch: Batch,
    loader: BatchLoader | None,
    given_plan: Plan | None,
    arguments: OptimizerArguments,
) -> AnyEngine:
    log = get_logger(mesh.rank)
    if mesh.device.type == "cpu" and config.mesh.keep_cpu_memory:
        keep_freed_memory()
    sizes = config.batch_sizes(mesh.data.size)
    if sizes.changes and given_plan is not None:
        raise _plan_in_a_ramp_up(given_plan)
    is_provisional = plan_is_provisional(config.pipeline, mesh.pipeline.size, given_plan)
    if is_provisional:
        config = _with_chosen_vocabulary(config, mesh, model, batch, loader)
    cut = config.pipeline.vocabulary == "parallel" and mesh.pipeline.size > 1
    staged = vocabulary_split(model).without_vocabulary(model) if cut else model
    chooser = PlanChooser(
        config, mesh, model, batch.num_microbatches, loader, trains=arguments.trains(config)
    )
    # The passes of a cut vocabulary are not measured, so the plan of the first step stays.
    is_tuned = is_provisional and not cut
    cost_key = _cost_key(config, mesh, model) if is_tuned else None
    if is_provisional:
        chosen, cache = _first_plan(chooser, mesh, cost_key)
    else:
        chosen, cache = from_first(mesh.world, lambda: chooser.configured_plan(given_plan)), None
    plan = chosen.plan
    if chosen.reason is not None:
        log.info(chosen.reason)
    options = _build_options(config, mesh, model)
    # What "auto" means if the layers cannot be counted.
    by = "parameters" if config.pipeline.partition == "auto" else config.pipeline.partition
    bounds = chosen.bounds or stage_bounds(
        staged, by, plan.num_stages, mesh, options, lambda: _first_micro_batch(loader)
    )
    tuner: ScheduleTuner | None = None
    if is_tuned:
        tuner = ScheduleTuner(mesh, plan, bounds, chosen.seconds, chooser, cache, log)
    plans = StepPlans(mesh, plan, chooser if sizes.changes else None)
    plans.check(bounds, [size // batch.samples_per_slice for size in sizes.sizes[:-1]])
    local = build_local_model(model, mesh, bounds, plan.rank_of_stage, options, cut)
    if config.lora is not None and config.lora.path is not None:
        load_adapter(Path(config.lora.path), model, local)
    make_replicas_equal(model, mesh, local)
    if arguments.trains(config):
        _warn_of_running_statistics(config, mesh, model, batch, options)
    log_stages(log, staged, bounds, plan.rank_of_stage, model if cut else None)
    log.info(batch.equation)
    components = build_components(
        config, mesh, model, local, plan, loader, arguments, plan_may_change=tuner is not None
    )
    mover = StageMover(config, mesh, model, options, arguments, components.executors)
    return engine_class(config, mesh, plan, replace(components, plans=plans, mover=mover), tuner)


def _first_plan(
    chooser: PlanChooser, mesh: Mesh, cost_key: Mapping[str, Any] | None
) -> tuple[ChosenPlan, Path | None]:
    """Return the first plan of schedule `auto`, and the file of its costs; collective.

    Args:
        cost_key: everything that measured costs depend on; None: they are not measured.
    """
    if cost_key is None:
        return from_first(mesh.world, lambda: chooser.first_plan(None)), None
    return first_tuned_plan(chooser, mesh, cost_key, get_logger(mesh.rank))


def _build_options(config: Config, mesh: Mesh, model: PipelineModule) -> BuildOptions:
    return BuildOptions(
        tensor=mesh.tensor,
        device=mesh.device,
        seed=config.seed,
        seed_layers=config.pipeline.seed_layers,
        checkpoint_interval=checkpoint_interval(config, len(model)),
    )


def _warn_of_running_statistics(
    config: Config, mesh: Mesh, model: PipelineModule, batch: Batch, options: BuildOptions
) -> None:
    """Log the warning about BatchNorm and similar layers once.

    Raises:
        ConfigError: as `running_statistics_warning`; on every rank.
    """
    recomputes = options.checkpoint_interval > 0
    warning = running_statistics_warning(model, config, batch, checkpointing=recomputes)
    if warning is not None and mesh.rank == 0:
        get_logger().warning(warning)


def _plan_in_a_ramp_up(plan: Plan) -> ConfigError:
    return ConfigError(
        f"training.rampup_batch_size changes the number of micro-batches, and the plan "
        f"{plan.name!r} given to initialize() is for {plan.num_microbatches}: name a schedule in "
        "pipeline.schedule",
        on_every_rank=True,
    )


def _with_chosen_vocabulary(
    config: Config, mesh: Mesh, model: PipelineModule, batch: Batch, loader: BatchLoader | None
) -> Config:
    """Return the config with a cut vocabulary where schedule `auto` chooses it; collective.

    With iterators of the caller only on two ranks: other ranks need not have one.
    """
    cut = with_cut_vocabulary(config, model)
    if cut is None or (loader is None and mesh.pipeline.size > 2):
        return config
    chooser = PlanChooser(config, mesh, model, batch.num_microbatches, loader)
    return cut if from_first(mesh.world, lambda: chooser.prefers(cut)) else config


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


def _first_micro_batch(loader: BatchLoader | None) -> tuple[Any, Any]:
    """Return the micro-batch that partition "profile" measures; the loader does not consume it."""
    if loader is None or not loader.is_map_style:
        raise ConfigError(
            "pipeline.partition 'profile' measures the layers with a micro-batch, and there is "
            "none: give initialize() a map-style training_data, or use 'parameters'"
        )
    return loader.peek()


def _cost_key(config: Config, mesh: Mesh, model: PipelineModule) -> dict[str, Any]:
    """Return everything that the cost of a micro-batch on a layer depends on."""
    sections = ["model", "activation_checkpointing", "fp16", "bf16", "data_types"]
    if config.compile.enabled:
        sections.append("compile")
    whole = config.to_dict()
    return {
        "layers": model.layer_names,
        "parameters": model.count_parameters(),
        "partition": config.pipeline.partition,
        "checkpoint_interval": config.pipeline.activation_checkpoint_interval,
        "mesh": str(mesh.topology),
        "sequence_parallel": config.mesh.sequence_parallel,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        **{name: whole.get(name) for name in sections},
    }
