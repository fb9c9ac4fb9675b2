"""What an engine is built from: the config, the mesh, the model and the data of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipemega.config import Batch, Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer.build_step import OptimizerArguments
from pipemega.pipeline.model.module import BuildOptions, PipelineModule
from pipemega.pipeline.model.recompute import checkpoint_interval
from pipemega.pipeline.model.stages import LocalModel, build_local_model
from pipemega.pipeline.model.vocabulary_shard import vocabulary_split
from pipemega.planning.stage_costs import Sample


@dataclass(frozen=True)
class RunSetup:
    """What an engine is built from.

    Args:
        config, mesh: of the run.
        net: the whole model, with its adapters.
        arguments: of the user, about the optimizer.
        loader: of the training data; None if the caller passes iterators.
        example: a micro-batch, from which the model is counted; None: see `PlanChooser`.
        has_read: the first step was read, so no shapes follow.
    """

    config: Config
    mesh: Mesh
    net: PipelineModule
    arguments: OptimizerArguments = field(default_factory=OptimizerArguments)
    loader: BatchLoader | None = None
    example: Sample | None = None
    has_read: bool = False

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
        )

    def build_stages(self, bounds: Sequence[int], rank_of_stage: Sequence[int]) -> LocalModel:
        """Build the stages of this rank; see `build_local_model`."""
        options, cuts = self.build_options, self.cuts_vocabulary
        return build_local_model(self.net, self.mesh, bounds, rank_of_stage, options, cuts)
