"""The state of an engine between two steps: in checkpoints, and on its way to other ranks."""

from pathlib import Path
from typing import Any

from pipemega.checkpoint import Counters, LoadOptions
from pipemega.diagnostics.replica_check import check_replicas
from pipemega.distributed.mesh import gather_objects
from pipemega.engine.batch_reader import StepData
from pipemega.engine.stage_mover import BuiltModules, describe_cut
from pipemega.engine.step_callbacks import TrainStep
from pipemega.engine.step_engine import StepEngine
from pipemega.engine.step_runner import StepRunner
from pipemega.errors import PipemegaError
from pipemega.monitor import get_logger
from pipemega.optimizer import StepReport
from pipemega.pipeline.execution_state import Results
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds


class CheckpointedEngine(StepEngine):
    """Saves the state of an engine between two steps, loads it, and moves it to other ranks."""

    def _begin_step(
        self, runner: StepRunner, data: StepData, *, keep_outputs: bool = False
    ) -> TrainStep:
        step = super()._begin_step(runner, data, keep_outputs=keep_outputs)
        step.obstacle = self._obstacle_to_move
        return step

    def _finish_step(
        self, runner: StepRunner, step: TrainStep, data: StepData, results: Results
    ) -> StepReport:
        report = super()._finish_step(runner, step, data, results)
        if step.next_bounds is not None:
            self._move_stages(self.plan, step.next_bounds)
        return report

    def _with_final_stages(self, data: StepData) -> StepData:
        late, self._late_choice = self._late_choice, None
        if late is None:
            return data
        first = late.of(data)
        place, bounds = self.plan.rank_of_stage, self._model.bounds
        if (first.plan.rank_of_stage, first.bounds) != (place, bounds):
            obstacle = self._obstacle_to_move(first.plan, first.bounds, is_first=True)
            if obstacle:
                if self.mesh.rank == 0:
                    wanted = describe_cut(first.bounds, first.plan.rank_of_stage)
                    get_logger().warning(
                        f"the stages stay on layers {describe_cut(bounds, place)}, although "
                        f"{wanted} would be chosen: {obstacle}; give "
                        "initialize(example=(inputs, labels)), so that they are built there"
                    )
                first = late.on(self.plan, bounds)
            else:
                self._move_stages(first.plan, first.bounds, late.built)
        self.plan, self._plans = first.plan, first.plans
        if first.tuner is not None:
            self._callbacks.insert(0, first.tuner)
        return self._reader.for_these_stages(data)

    def _obstacle_to_move(self, plan: Plan, bounds: Bounds, *, is_first: bool = False) -> str:
        """Return why the stages cannot move, as a clause; "" if they can. Collective.

        Args:
            plan, bounds: as for `_move_stages`.
            is_first: before the first step, whose data have been read.
        """
        if self._step is None:
            return "the run has no optimizer"
        if plan.has_vocabulary != self.plan.has_vocabulary:
            return "only one of the two plans has vocabulary parallelism"
        reads, place = self.loader is None or not self.loader.is_map_style, plan.rank_of_stage
        readers = self.plan.rank_of_stage[0], self.plan.rank_of_stage[-1]
        if reads and not {place[0], place[-1]} <= set(readers):
            return (
                f"pipeline rank {place[-1]} would read labels from now on, and its iterator is at "
                "the first step; give initialize() map-style training data"
            )
        if self._profiler is not None:
            self._profiler.cancel_counting()
        if is_first and any(gather_objects(self._module_was_read, self.mesh.world)):
            return "engine.module was read, so the caller may refer to its parameters"
        return self._mover.obstacle(self._model, self._step, bounds, is_first=is_first)

    def _move_stages(self, plan: Plan, bounds: Bounds, built: BuiltModules | None = None) -> None:
        """Move the stages to the ranks of `plan`, between two steps; collective.

        Args:
            plan: of the next steps, lowered.
            bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
            built: as for `StageMover.move`.

        Raises:
            NonFiniteError, LossScaleError: as `settle`, after the move.
        """
        assert self._step is not None, "the caller has asked _obstacle_to_move"
        failed: PipemegaError | None = None
        try:
            self._settle()
        except PipemegaError as error:
            if not error.on_every_rank:
                raise
            # The step is undone. The run may continue after that, with the plan of the new stages.
            failed = error
            self._settle()
        model, executor = self._mover.move(self._model, self._step, plan, bounds, built)
        self.plan = plan
        self._use_stages(model, executor)
        if failed is not None:
            raise failed

    def check_replicas(self) -> None:
        """Compare all copies of each parameter bit by bit.

        Raises:
            ReplicaError: copies differ; on every rank.
        """
        with self._failures.propagate_errors("check_replicas"):
            self._settle()
            check_replicas(self._model, self.mesh)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> Path | str:
        """Save a checkpoint, as `Engine.save_checkpoint`, even if this step is saved already."""
        with self._failures.propagate_errors("save_checkpoint"):
            self._settle()
            counters = Counters(self.global_steps, self.consumed_samples, self._run_state())
            return self._checkpoints.save(
                save_dir, tag, client_state, counters, set_latest=save_latest
            )

    def _run_state(self) -> dict[str, Any]:
        """Return the state of the run that is saved with a checkpoint, as JSON values."""
        return {}

    def finish_saving(self) -> None:
        """Wait until background writes of `checkpoint.async` are complete.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
        """
        with self._failures.propagate_errors("finish_saving"):
            self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        strict: bool = True,
    ) -> tuple[Path | str, Any]:
        """Load a checkpoint; see `Engine.load_checkpoint`."""
        options = LoadOptions(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            strict=strict,
            verify=self.config.checkpoint.verify,
            allow_changes=self.config.checkpoint.allow_changes,
        )
        with self._failures.propagate_errors("load_checkpoint"):
            self._settle()
            loaded = self._checkpoints.load(load_dir, tag, options)
            if loaded.counters is not None:
                self.global_steps = loaded.counters.global_steps
                self.consumed_samples = loaded.counters.consumed_samples
                self.epoch = self._data.start()
                self._restore_run_state(loaded.counters.run)
        return loaded.path, loaded.client

    def reload(self, folder: str | Path) -> None:
        """Load the newest checkpoint of a folder; the data continue after the last batch read."""
        self._data.reload(lambda: self.load_checkpoint(folder))
        self._end_epochs()

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Restore what `_run_state` returned; {} if a run without state has saved."""
