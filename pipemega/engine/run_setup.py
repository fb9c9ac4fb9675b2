"""What an engine is built from: config, mesh, model, data; and the executor of any stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module

import torch.distributed as dist

from pipemega.config import Batch, Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError
from pipemega.layer_costs.stage_costs import Sample
from pipemega.monitor import MultiTimer, get_logger
from pipemega.optimizer import OptimizerStep, ZeroMasterParams
from pipemega.optimizer.build_step import OptimizerArguments, precision_of
from pipemega.pipeline.activation_offload import ActivationOffload, offloads_from
from pipemega.pipeline.connections import connect
from pipemega.pipeline.execution_state import ComputeWrapper
from pipemega.pipeline.executor import Executor, RankStages
from pipemega.pipeline.messages import Header
from pipemega.pipeline.microbatch_loss import reduced_loss
from pipemega.pipeline.model.fp8_linears import Fp8Products, enable_fp8, log_fp8
from pipemega.pipeline.model.graphed_layers import LayerGraphs, graphs_on
from pipemega.pipeline.model.module import BuildOptions, PipelineModule
from pipemega.pipeline.model.recompute import checkpoint_interval
from pipemega.pipeline.model.stages import LocalModel, build_local_model
from pipemega.pipeline.model.vocabulary_shard import vocabulary_split
from pipemega.pipeline.plan.fill_waits import Waits
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.split_backward import enable_split_backward
from pipemega.pipeline.transport import Transport
from pipemega.pipeline.vocabulary_runs import VocabularyRuns
from pipemega.pipeline.weight_queue import WaitFiller, WeightGradQueue


@dataclass(frozen=True)
class RunSetup:
    """What an engine is built from.

    Args:
        config, mesh: the config and the device mesh of the run.
        net: the whole model, with its adapters.
        arguments: the user's arguments about the optimizer.
        loader: the loader of the training data; None if the caller passes iterators.
        example: a micro-batch, from which the model is counted; None: see `PlanChooser`.
        has_read: the first step was read, so no shapes follow.
        fp8: the products of linears in fp8; None: in the dtype of the run.
    """

    config: Config
    mesh: Mesh
    net: PipelineModule
    arguments: OptimizerArguments = field(default_factory=OptimizerArguments)
    loader: BatchLoader | None = None
    example: Sample | None = None
    has_read: bool = False
    fp8: Fp8Products | None = None

    @property
    def batch(self) -> Batch:
        """The sizes of a training step, after a ramp-up."""
        return self.config.batch(self.mesh.data.size)

    @property
    def trains(self) -> bool:
        """Whether the run has an optimizer."""
        return self.arguments.trains(self.config)

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether embedding and head are cut over the pipeline ranks."""
        return self.config.pipeline.vocabulary == "parallel" and self.mesh.pipeline.size > 1

    @cached_property
    def staged_net(self) -> PipelineModule:
        """The layers that stages consist of: all, or those without the cut vocabulary.

        Raises:
            ConfigError: the vocabulary of this model cannot be cut; on every rank.
        """
        net = self.net
        return vocabulary_split(net).without_vocabulary(net) if self.cuts_vocabulary else net

    @property
    def build_options(self) -> BuildOptions:
        """How the layers are built."""
        config, mesh = self.config, self.mesh
        return BuildOptions(
            tensor=mesh.tensor,
            device=mesh.device,
            seed=config.seed,
            seed_layers=config.pipeline.seed_layers,
            checkpoint_interval=checkpoint_interval(config, len(self.net)),
            expert=mesh.expert,
        )

    def build_stages(self, bounds: Sequence[int], rank_of_stage: Sequence[int]) -> LocalModel:
        """Build the stages of this rank; see `build_local_model`."""
        options, cuts = self.build_options, self.cuts_vocabulary
        return build_local_model(self.net, self.mesh, bounds, rank_of_stage, options, cuts)


class ExecutorBuilder:
    """Builds the executor of this rank for any stages of the model.

    Args:
        setup: the setup of the run.
        timers: the timers of the engine.
        plan_may_change: a plan that splits backward may replace the one of the executor.
        waits: with pipeline.fill_waits, the exchanges of each layer.
    """

    def __init__(
        self,
        setup: RunSetup,
        timers: MultiTimer,
        plan_may_change: bool,
        waits: Sequence[Waits] = (),
    ) -> None:
        self._layer_waits = waits
        self._setup, self._config, self._mesh = setup, setup.config, setup.mesh
        self._timers, self._plan_may_change = timers, plan_may_change
        self._groups: list[dist.ProcessGroup] = []
        device = "cpu" if "cpu" in self._mesh.pipeline.devices else self._mesh.device.type
        self._compiles = self._config.compile.applies(device)
        self._fuses = self._config.fuses_gradients(device)

    def splits_backward(self, plan: Plan) -> bool:
        """Return whether an executor for `plan` runs I and W."""
        return self._plan_may_change or plan.splits_backward

    def _takes_weight_gradients(self, plan: Plan) -> bool:
        """Return whether a queue takes the weight gradients: in I, or in B to fuse them."""
        # With the queue in every plan, a compiled layer rounds equally under all schedules.
        compiled = self._compiles and self._mesh.pipeline.size > 1
        # In a whole backward without a compiler, column-parallel linears overlap dW with the
        # communication of dx, which saves more.
        fuses = self._fuses and self._mesh.tensor.size == 1
        return self.splits_backward(plan) or compiled or fuses

    def build(self, model: LocalModel, plan: Plan, step: OptimizerStep | None) -> Executor:
        """Return the executor for the local stages `model`; collective over the pipeline.

        Raises:
            ConfigError: a message has no declared shape.
        """
        config, setup = self._config, self._setup
        log = get_logger(self._mesh.rank)
        counts = enable_fp8(setup.staged_net, model.stages, setup.fp8)
        if setup.fp8 is not None:
            log_fp8(counts, config.fp8.recipe, self._mesh, log)
        weight_queue = readiness = None
        if step is not None and self._takes_weight_gradients(plan):
            weight_queue = WeightGradQueue(step.gradients, fuses=self._fuses)
            enable_split_backward(model.stages.values(), weight_queue)
        if step is not None and isinstance(step.masters, ZeroMasterParams):
            step.masters.register_param_waits(model.modules)
            # In a plan without I and W, the queue adds before autograd reports a gradient.
            readiness = step.masters.bucket_readiness(hooks=not self.splits_backward(plan))
        before_training = None
        if self._compiles:
            # It imports the compiler.
            compiled = import_module("pipemega.pipeline.model.compiled_layers")
            before_training = compiled.compile_layers(model.stages, config.compile, self._mesh, log)
        transport = self._transport(plan, model.bounds)
        stages = RankStages(
            self._mesh.pipeline.rank,
            model.stages,
            plan.num_stages,
            reduced_loss(config, model.loss_fn),
            precision_of(config).cast_inputs,
        )
        wrapper, ends = self._wrapper(model, weight_queue), None
        if model.vocabulary is not None:
            assert transport is not None, "vocabulary parallelism needs several pipeline ranks"
            copies = isinstance(wrapper, LayerGraphs)
            ends = VocabularyRuns(
                stages, model.vocabulary, transport, readiness, copies_output=copies
            )
        return Executor(
            stages, transport, self._timers, weight_queue, readiness, before_training, ends, wrapper
        )

    def _wrapper(self, model: LocalModel, queue: WeightGradQueue | None) -> ComputeWrapper | None:
        device, log = self._mesh.device, get_logger(self._mesh.rank)
        if self._config.pipeline.fill_waits and queue is not None:
            return WaitFiller(model.stages, queue, self._layer_waits)
        if self._config.activation_checkpointing.cpu_checkpointing:
            if offloads_from(device.type):
                return ActivationOffload(device, model.modules)
            log.info(
                "activation_checkpointing.cpu_checkpointing has no effect on a CPU: the "
                "activations are in host memory already"
            )
        # Not with activations in host memory: the config refuses both.
        if self._config.compile.cuda_graphs:
            if graphs_on(device.type):
                return LayerGraphs(model.stages, model.bounds[-1], queue, self._mesh, log)
            log.info("compile.cuda_graphs has no effect on a CPU")
        return None

    def _transport(self, plan: Plan, bounds: Sequence[int]) -> Transport | None:
        mesh, section = self._mesh, self._config.pipeline
        shapes = section.shapes
        if mesh.pipeline.size == 1:
            return None
        place = plan.rank_of_stage
        routes = connect(
            mesh.pipeline,
            place,
            mesh.device,
            mesh.timeout,
            plan.transfers,
            self._groups,
            section.max_ctas,
        )
        return Transport(
            mesh.pipeline,
            place,
            mesh.device,
            shapes,
            declared_headers(self._setup.net, bounds) if shapes == "declared" else {},
            mesh.timeout,
            routes,
        )


def declared_headers(net: PipelineModule, bounds: Sequence[int]) -> dict[int, Header]:
    """Return the header of the message at each boundary of the stages.

    Raises:
        ConfigError: the model declares none.
    """
    declared: dict[int, Header] = {}
    for boundary, position in enumerate(bounds[1:-1]):
        message = net.boundary(position)
        if message is None:
            raise ConfigError(
                f"pipeline.shapes is 'declared', but the model declares no input of layer "
                f"{position} ({net.layer_names[position]}), the first layer of a stage: give "
                f"PipelineModule(..., boundary=...), or use 'cached'",
                on_every_rank=True,
            )
        declared[boundary] = Header.of(message)
    return declared
