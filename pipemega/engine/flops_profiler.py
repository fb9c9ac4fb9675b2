"""Profiles the modules of all stages in one training step, and prints a table."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipemega.config.batch_equation import Batch
from pipemega.config.profilers import FlopsProfilerSection
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.flops_report import FlopsProfile, RankProfile
from pipemega.engine.step_callbacks import StepCallback, TrainStep
from pipemega.monitor import MultiTimer, get_logger, print_table
from pipemega.pipeline.module import Stage
from pipemega.pipeline.recorder import step_clock
from pipemega.profiling.module_profiler import ModuleProfiler, ProfiledLayer


def profiled_layers(stages: Iterable[Stage]) -> tuple[dict[int, ProfiledLayer], list[Stage]]:
    """Return the layers of stages by position, and the stages, which report them."""
    stages = list(stages)
    layers = {
        position: ProfiledLayer(
            stage.layers[str(position)], f"layers.{position}", stage.name_of(position), 1
        )
        for stage in stages
        for position in range(stage.start, stage.stop)
    }
    return layers, stages


class FlopsProfiler(StepCallback):
    """Measures one step on all ranks; the result is of data and tensor rank 0.

    All ranks, because a stage that reports its layers computes whole logits, with collectives of
    the tensor ranks. Counting FLOPs takes time, so they are counted in the step before, if there is
    one.

    Args:
        section: `flops_profiler`, which selects the step.
        batch: of a step.
        layers: of this rank, by position.
        stages: report their layers; none if the caller runs the layers within `forward`.
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
        layers: Mapping[int, ProfiledLayer],
        stages: Iterable[Stage],
        timers: MultiTimer,
        num_parameters: int,
    ) -> None:
        self._section, self._mesh, self._batch = section, mesh, batch
        self._stages, self._timers, self._num_parameters = tuple(stages), timers, num_parameters
        self._step = max(1, section.profile_step)
        clock = step_clock(mesh.device)
        self._profiler = ModuleProfiler(layers, clock, section.module_depth)
        self._is_counting = False
        self._finish: Callable[[], RankProfile] | None = None
        self.profile: FlopsProfile | None = None

    def start(self, step: int) -> None:
        """Start to count in the step before the one of the config, and to time in that one."""
        if step not in (self._step - 1, self._step):
            return
        if not self._is_counting:
            self._is_counting = True
            for stage in self._stages:
                stage.observer = self._profiler
            self._profiler.start()
        if step == self._step and self._finish is None:
            self._finish = self._start_times()

    def cancel_counting(self) -> None:
        """Count in the step of the config itself, because the stages may change before it."""
        if self._is_counting and self._finish is None:
            self._is_counting = False
            self._profiler.stop()
            for stage in self._stages:
                stage.observer = None

    def _start_times(self) -> Callable[[], RankProfile]:
        """Start the times of the step; return what ends them."""
        timers, was_enabled, before = self._timers, self._timers.enabled, self._timers.totals()
        timers.enabled = True
        only_timed = self._profiler.restart_times()
        started = time.perf_counter()

        def finish() -> RankProfile:
            modules = tuple(self._profiler.stop())
            for stage in self._stages:
                stage.observer = None
            timers.enabled = was_enabled
            seconds = {name: s - before.get(name, 0.0) for name, s in timers.totals().items()}
            return RankProfile(modules, seconds, time.perf_counter() - started, only_timed)

        return finish

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Measure a forward of layer 0 that the caller runs in the block, for this step."""
        self.start(step)
        if not self._is_counting:
            yield
            return
        self._profiler.enter(0, None, None)
        try:
            yield
        except BaseException:
            self._profiler.failed(0)
            raise
        self._profiler.leave(0, None, None)

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
