"""Profiles the modules of all stages in one training step, and prints a table."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipemega.config.batch import Batch
from pipemega.config.sections.monitor_sections import FlopsProfilerSection
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.flops_report import FlopsProfile, RankProfile
from pipemega.engine.train_step import StepFeature, TrainStep
from pipemega.monitor import MultiTimer, get_logger, print_table
from pipemega.pipeline.model.module import Stage
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.recorder import step_clock
from pipemega.profiling.module_profiler import ModuleCost, ModuleProfiler, ProfiledLayer

LayerSource = tuple[Mapping[int, ProfiledLayer], Sequence[Stage | VocabularyShard]]
"""Layers by position, and what reports them to an observer."""


def layer_sources(model: LocalModel) -> list[LayerSource]:
    """Return the layers of the local stages, and those of the local shard of the vocabulary."""
    stages = list(model.stages.values())
    layers = {
        position: ProfiledLayer(
            stage.layers[str(position)], f"layers.{position}", stage.name_of(position), 1
        )
        for stage in stages
        for position in range(stage.start, stage.stop)
    }
    shard = model.vocabulary
    return [(layers, stages), *([] if shard is None else [(_shard_layers(shard), [shard])])]


def _shard_layers(shard: VocabularyShard) -> dict[int, ProfiledLayer]:
    """Return the embedding and the head, of whose FLOPs each shard has an equal part."""
    part = shard.split.token_loss.vocab_size / (shard.pipeline.size * shard.tensor.size)
    # S also computes a product of the backward, so its operations are not those of the forward.
    formulas = {shard.start: None, shard.stop - 1: lambda x: 2.0 * x.numel() * part}
    found = {}
    for position, formula in formulas.items():
        layer, name = shard.layers[str(position)], f"layers.{position}"
        found[position] = ProfiledLayer(layer, name, type(layer).__name__, 1, formula)
    return found


class FlopsProfiler(StepFeature):
    """Measures one step on all ranks; the result is of data and tensor rank 0.

    All ranks, because a stage that reports its layers computes whole logits, with collectives of
    the tensor ranks. Counting FLOPs takes time, so they are counted in the step before, if there is
    one.

    Args:
        section: `flops_profiler`, which selects the step.
        batch: of a step.
        sources: of the layers of this rank; a source without stages if the caller runs the layers
            within `forward`.
        timers: of the engine; they run during the step.
        num_parameters: of the model.

    Attributes:
        profile: of the step; on rank 0, after the step.
    """

    def __init__(
        self,
        section: FlopsProfilerSection,
        mesh: Mesh,
        batch: Batch,
        sources: Sequence[LayerSource],
        timers: MultiTimer,
        num_parameters: int,
    ) -> None:
        self._section, self._mesh, self._batch = section, mesh, batch
        self._timers, self._num_parameters = timers, num_parameters
        self._step = max(1, section.profile_step)
        clock = step_clock(mesh.device)
        self._profilers = [
            (ModuleProfiler(layers, clock, section.module_depth), modules)
            for layers, modules in sources
        ]
        self._is_counting = False
        self._finish: Callable[[], RankProfile] | None = None
        self.profile: FlopsProfile | None = None

    def start(self, step: int) -> None:
        """Start to count in the step before the one of the config, and to time in that one."""
        if step not in (self._step - 1, self._step):
            return
        if not self._is_counting:
            self._is_counting = True
            for profiler, modules in self._profilers:
                profiler.start()
                for module in modules:
                    module.observer = profiler
        if step == self._step and self._finish is None:
            self._finish = self._start_times()

    def cancel_counting(self) -> None:
        """Count in the step of the config itself, because the stages may change before it."""
        if self._is_counting and self._finish is None:
            self._is_counting = False
            self._stop()

    def _stop(self) -> tuple[ModuleCost, ...]:
        """Stop measuring layers; return their costs."""
        for _, modules in self._profilers:
            for module in modules:
                module.observer = None
        return tuple(cost for profiler, _ in self._profilers for cost in profiler.stop())

    def _start_times(self) -> Callable[[], RankProfile]:
        """Start the times of the step; return what ends them."""
        timers, was_enabled, before = self._timers, self._timers.enabled, self._timers.totals()
        timers.enabled = True
        were_counted = [profiler.restart_times() for profiler, _ in self._profilers]
        started = time.perf_counter()

        def finish() -> RankProfile:
            modules = self._stop()
            timers.enabled = was_enabled
            seconds = {name: s - before.get(name, 0.0) for name, s in timers.totals().items()}
            return RankProfile(modules, seconds, time.perf_counter() - started, all(were_counted))

        return finish

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Measure a forward of layer 0 that the caller runs in the block, for this step."""
        self.start(step)
        if not self._is_counting:
            yield
            return
        ((profiler, _),) = self._profilers
        with profiler.measure(0, None):
            yield

    def before_step(self, step: TrainStep) -> None:
        self.start(step.number)

    def after_step(self, step: TrainStep) -> None:
        if self._finish is None:
            return
        own, self._finish, self._step, self._is_counting = self._finish(), None, -1, False
        ranks = gather_objects(own, self._mesh.pipeline)
        if self._mesh.rank > 0:
            return
        self.profile = FlopsProfile(
            step.number,
            tuple(ranks),
            self._mesh.tensor.size,
            self._mesh.data.size,
            step.plan.num_microbatches,
            self._batch.micro_batch_size,
            self._num_parameters,
        )
        self._write(step.number, self.profile.text(self._section))

    def _write(self, step: int, text: str) -> None:
        if not self._section.output_file:
            print_table(text)
            return
        path, log = Path(self._section.output_file), get_logger(self._mesh.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            log.warning(
                "flops_profiler.output_file cannot be written (%s): the table is printed", error
            )
            print_table(text)
        else:
            log.info("the flops profile of step %d is in %s", step, path)
