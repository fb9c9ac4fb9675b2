"""Checkpointer: saves and loads the state of one engine.

Two keys decide which learning rate, schedule and weight decay a resumed run uses:

    override_opt_param_scheduler        true, null: the values in the config
                                        false: a checkpoint with other values is refused
    use_checkpoint_opt_param_scheduler  true: the values in the checkpoint

The position in the schedule always comes from the checkpoint.
"""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipemega.checkpoint import differences, layout, save_load, tensors
from pipemega.checkpoint.async_save import BackgroundTask, Staging
from pipemega.checkpoint.differences import ConfigChange, is_within
from pipemega.checkpoint.layout import Retention, estimated_bytes, warn_at_start
from pipemega.checkpoint.manifest import CollectiveIO
from pipemega.checkpoint.save_load import CheckpointReader, RunState
from pipemega.checkpoint.tensors import LoadOptions, TensorShard
from pipemega.config import Config, load
from pipemega.config.sections.scheduler_section import RunLength, SchedulerSection
from pipemega.data.loader import BatchLoader
from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Axis, Mesh, gather_objects
from pipemega.errors import CheckpointError, DataError
from pipemega.lazy_imports import load_name
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.model.stages import LocalModel
from pipemega.random import derive_seed, rng_state, seed_rng, set_rng_state
from pipemega.storage.filesystem import LocalStorage, Storage, is_remote, storage_at
from pipemega.storage.locks import LockOptions, folder_locks

_PARAMS = ("lr", "weight_decay")
_KEYS = ("scheduler", "optimizer.groups", *(f"optimizer.params.{name}" for name in _PARAMS))
# The defaults of lengths of the schedule.
_LENGTHS = ("training.train_steps", "training.train_samples", "training.epochs")


def refuse_other_values(changes: Sequence[ConfigChange], config: Config, where: str) -> None:
    """Refuse a checkpoint with other values, if the config does not say which ones apply.

    Args:
        changes: the changes of the config since the checkpoint was saved.
        where: the path of the checkpoint.

    Raises:
        CheckpointError: lists them.
    """
    settings = config.checkpoint
    if settings.override_opt_param_scheduler is not False:
        return
    if settings.use_checkpoint_opt_param_scheduler:
        return  # `with_values_of` has replaced them
    keys = (*_KEYS, *(_LENGTHS if _needs_length(config.scheduler) else ()))
    found = [str(change) for change in changes if is_within(change.key, keys)]
    if found:
        raise CheckpointError(
            f"the learning rate, its schedule or the weight decay differ from those of {where}: "
            f"{'; '.join(found)}. Restore them; or set "
            "checkpoint.override_opt_param_scheduler to true to use the new values, or "
            "checkpoint.use_checkpoint_opt_param_scheduler to true to use those of the checkpoint"
        )


def _needs_length(section: SchedulerSection | None) -> bool:
    """Return whether the length of the run changes the schedule."""
    if section is None:
        return False
    one, other = (section.arguments(RunLength(n, n, n)) for n in (1, 2))
    return one != other


def with_values_of(config: Config, stored: Mapping[str, Any], data_size: int) -> Config:
    """Return `config` with the values of a checkpoint.

    Args:
        stored: the config of the run that saved it.
        data_size: number of its data ranks.

    Raises:
        ConfigError: the stored config is not valid any more.
    """
    saved = load(stored)
    section = saved.scheduler
    if section is not None and section.params is not None:
        total = saved.batch_sizes(data_size).run_length(saved.training).in_unit(section.by)
        # The new run may have another length.
        fixed = section.params.with_length(total, section.by)
        section = section.model_copy(update={"params": fixed})
    update: dict[str, Any] = {"scheduler": section}
    if config.optimizer is not None and saved.optimizer is not None:
        old, new = saved.optimizer.params, config.optimizer.params
        same = {n: getattr(old, n) for n in _PARAMS if hasattr(old, n) and hasattr(new, n)}
        params_of_run = new.model_copy(update=same)
        update["optimizer"] = config.optimizer.model_copy(update={"params": params_of_run})
    return config.model_copy(update=update)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counters:
    """Progress of a run: optimizer steps, samples over all data ranks, state of its records.

    Args:
        run: history, sinks and evaluations of the run, as JSON values.
    """

    global_steps: int
    consumed_samples: int
    run: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """The result of loading.

    Args:
        path: the checkpoint's folder.
        client: the caller's state that was saved.
        counters: the progress of the run that saved; None if only the module was loaded.
    """

    path: Path | str
    client: Any
    counters: Counters | None


class Checkpointer:
    """Saves and loads everything that the next step of an engine depends on; collective.

    Args:
        config, mesh, model, step, loader: the parts of the engine with these names.
        total_steps: number of steps of the whole run; None: not known.

    Attributes:
        model: the current stages; set by the engine when they have moved.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: LocalModel,
        step: OptimizerStep | None,
        loader: BatchLoader | None,
        total_steps: int | None = None,
    ) -> None:
        self._config, self._mesh, self.model = config, mesh, model
        self._step, self._loader = step, loader
        self._unclaimed: tuple[dict[str, Any], LoadOptions, list[ConfigChange]] | None = None
        settings = config.checkpoint
        self._retention = Retention(settings.keep_last, settings.keep_every)
        self._background = BackgroundTask(mesh.world, mesh.timeout)
        self._staging = Staging(HostMemory(mesh.device))
        if settings.in_background:
            self._background.connect()
        if settings.save is not None:
            size = estimated_bytes(config.optimizer_state_bytes, mesh, model, step)
            if settings.in_background:
                self._staging.reserve(size)
            self._warn_if_space_is_short(size, total_steps)

    def set_loader(self, loader: BatchLoader) -> None:
        """Save and load the position of `loader` from now on.

        If a checkpoint was loaded before, the loader moves to the position in it.

        Raises:
            DataError: the checkpoint was saved with other data.
        """
        self._loader = loader
        if self._unclaimed is not None:
            self._load_loader(*self._unclaimed)

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        client: Any,
        counters: Counters,
        *,
        set_latest: bool = True,
    ) -> Path | str:
        """Write a checkpoint, or start writing it in the background; return its path.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are unchanged.
            FolderLockedError: another run uses the folder.
        """
        started = time.perf_counter()
        failed = self._background.wait()
        storage, settings = storage_at(folder), self._config.checkpoint
        ranks = CollectiveIO(self._mesh.world, storage)
        lock_options = run_lock_options(self._config, self._mesh)
        ranks.run_on_rank0(lambda: folder_locks.lock(storage, lock_options))
        tag = save_load.agree_on_tag(
            tag or layout.step_tag(counters.global_steps), ranks, settings.tag_validation
        )
        state = self._run_state(ranks, client, counters)

        def write(world: Axis) -> None:
            save_load.save(
                storage, tag, state, world, set_latest=set_latest, retention=self._retention
            )

        if failed is not None and self._mesh.rank == 0:
            _log.warning("%s; this time the run waits until the checkpoint is saved", failed)
        if not settings.in_background or failed is not None:
            write(self._mesh.world)
            return _path(storage, tag)
        staged = self._staging.copy(state.tensors)
        state.tensors = staged.shards
        if self._step is not None:
            self._step.protect(staged.copied)

        def write_copies(world: Axis) -> None:
            synchronize(staged.copied)
            write(world)

        self._background.start(write_copies)
        if self._mesh.rank == 0:
            waited = time.perf_counter() - started
            path = storage.full_path(tag)
            _log.info("saving %s in the background: the run waited %.3f s", path, waited)
        return _path(storage, tag)

    def wait(self) -> None:
        """Wait until the background save has finished.

        Raises:
            CheckpointError: it failed.
        """
        failed = self._background.wait()
        if failed is not None:
            raise failed

    def _warn_if_space_is_short(self, size: int, steps: int | None) -> None:
        """Log a warning if the checkpoints of this run will not fit into `checkpoint.save`.

        Args:
            size: bytes of a checkpoint that this rank writes.
        """
        settings = self._config.checkpoint
        if settings.save is None or is_remote(settings.save):
            return
        sizes = gather_objects(size, self._mesh.world)
        if self._mesh.rank == 0:
            length = self._config.training.epochs if settings.by == "epoch" else steps
            saves = math.ceil(length / settings.interval) if length and settings.interval else 1
            warn_at_start(storage_at(settings.save), sum(sizes), saves, settings.keep_last)

    def _run_state(self, ranks: CollectiveIO, client: Any, counters: Counters) -> RunState:
        mesh = self._mesh
        shards = tensors.logical_tensors(self.model, self._step, mesh)
        buffers = tensors.rank_buffers(self.model, mesh)
        per_rank = {"rng": rng_state(mesh.device), "buffers": buffers}
        return RunState(
            tensors={name: shard.outgoing for name, shard in shards.items()},
            shared={
                "mesh": str(mesh.topology),
                "global_steps": counters.global_steps,
                "consumed_samples": counters.consumed_samples,
                "run": counters.run,
                "optimizer_step": tensors.step_state(self._step),
                "loader": None if self._loader is None else self._loader.state_dict(),
                "config": self._config.to_dict(),
                "model": dict(self.model.metadata),
            },
            per_rank=save_load.serialize(per_rank),
            client=ranks.run_on_all(
                lambda: save_load.serialize_client_state(client) if ranks.is_rank0 else b""
            ),
        )

    def load(self, folder: str | os.PathLike[str], tag: str | None, options: LoadOptions) -> Loaded:
        """Restore the run that saved a checkpoint, or the parts of it that `options` select.

        All checks come first; after them the tensors of the run are overwritten. From a checkpoint
        that DeepSpeed wrote, only the weights are loaded.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged, or belongs to
                another model or to a run whose config must not change; on every rank.
        """
        started = time.perf_counter()
        # An error of the last background save was logged, and does not prevent loading.
        self._background.wait()
        storage = storage_at(folder)
        ranks = CollectiveIO(self._mesh.world, storage)
        foreign = ranks.run_on_rank0(lambda: layout.find_foreign(folder, tag))
        if foreign is not None:
            found, load_weights = foreign
            arguments = (found, self.model, self._step, self._mesh, options, ranks)
            return Loaded(found, dict(load_name(load_weights)(*arguments).client), None)
        reader = save_load.open_checkpoint(storage, tag, ranks, verify=options.verify)
        state = reader.found.state
        same_mesh = state["mesh"] == str(self._mesh.topology)

        def check_config_and_read_states() -> tuple[list[ConfigChange], dict[str, Any] | None, Any]:
            changes = self._check_config(reader, options)
            per_rank = same_mesh and not options.module_only
            rank_state = self._rank_state(reader) if per_rank else None
            return changes, rank_state, reader.client_state()

        changes, rank_state, client = ranks.run_on_all(check_config_and_read_states)
        shards, renamed = self._shards_to_load(reader, options, ranks)
        if not options.module_only:
            self._load_loader(state["loader"], options, changes)
        ranks.run_on_all(lambda: reader.tensors.read(shards, renamed))
        self._restore(state, shards, rank_state, options)
        if self._mesh.rank == 0:
            seconds = time.perf_counter() - started
            rate = save_load.throughput(reader.found.size, seconds)
            from_mesh = "" if same_mesh else f" (from the mesh {state['mesh']})"
            _log.info("loaded %s%s: %s", reader.full_path, from_mesh, rate)
        counters = Counters(
            int(state["global_steps"]), int(state["consumed_samples"]), _run_state(state, client)
        )
        path = _path(storage, reader.found.tag)
        return Loaded(path, client, None if options.module_only else counters)

    def _rank_state(self, reader: CheckpointReader) -> dict[str, Any]:
        """Return what this rank has saved, and the buffers of layers that were on another rank."""
        state: dict[str, Any] = reader.rank_state(self._mesh.rank)
        here = tensors.rank_buffers(self.model, self._mesh).keys()
        for rank in self._mesh.pipeline.ranks:
            if here <= state["buffers"].keys():
                break
            state["buffers"] |= reader.rank_state(rank)["buffers"]
        return state

    def _check_config(self, reader: CheckpointReader, options: LoadOptions) -> list[ConfigChange]:
        """Log or refuse the changes of the config; return them. [] if only the module is loaded."""
        if options.module_only:
            return []
        state = reader.found.state
        if "weights_only" in state:
            raise CheckpointError(
                f"{reader.full_path} contains only weights ({state['weights_only']}): set "
                f"checkpoint.load_module_only true (load_module_only=True), and the run starts at "
                f"step 0 with them"
            )
        changes = differences.config_changes(state["config"], self._config)
        if options.loads_schedule:
            refuse_other_values(changes, self._config, reader.full_path)
        allowed = (*options.allow_changes, *(() if options.strict else ("model", "lora")))
        text = differences.check_config_changes(changes, allowed, reader.full_path)
        if text is not None and self._mesh.rank == 0:
            _log.info(text)
        if self._step is not None and options.loads_optimizer:
            tensors.check_optimizer(state["optimizer_step"], self._step)
        return changes

    def _shards_to_load(
        self, reader: CheckpointReader, options: LoadOptions, ranks: CollectiveIO
    ) -> tuple[dict[str, TensorShard], dict[str, str]]:
        """Compare the tensors with the stored ones.

        Returns:
            those to read into; and key -> stored key, where it is another one.
        """
        step = self._step
        shards = tensors.model_tensors(self.model, step, self._mesh)
        stored = reader.tensors.tensors
        renamed: dict[str, str] = {}
        if "weights_only" in reader.found.state:
            names = tensors.names_in_run(shards, self.model, ranks)
            stored, renamed = tensors.match_imported(stored, *names, self.model)
        is_replica = not self._mesh.is_first_replica
        found = differences.tensor_differences(stored, shards, is_replica, ranks)
        if options.strict:
            differences.refuse_differences(reader.full_path, found)
        elif ranks.is_rank0:
            differences.log_differences(reader.full_path, found)
        different = {difference.name for difference in found}
        fits = {k: v for k, v in stored.items() if tensors.parameter_key(k) not in different}
        if step is not None and options.loads_optimizer:
            shards |= tensors.optimizer_tensors_to_load(fits, self.model, step, self._mesh)
        return {key: shard for key, shard in shards.items() if key in fits}, renamed

    def _restore(
        self,
        state: dict[str, Any],
        shards: dict[str, TensorShard],
        rank_state: dict[str, Any] | None,
        options: LoadOptions,
    ) -> None:
        buffers = {} if rank_state is None else rank_state["buffers"]
        tensors.restore(shards, state["optimizer_step"], buffers, self.model, self._step, options)
        if rank_state is not None:
            set_rng_state(rank_state["rng"], self._mesh.device)
        elif not options.module_only:
            # The mesh has changed: new RNG states, equal on all tensor ranks.
            mesh, samples = self._mesh, state["consumed_samples"]
            ranks = (mesh.pipeline.rank, mesh.data.rank)
            seed_rng(derive_seed(self._config.seed, "resumed", samples, *ranks), mesh.device)

    def _load_loader(
        self, stored: dict[str, Any] | None, options: LoadOptions, changes: list[ConfigChange]
    ) -> None:
        """Move the loader to the next sample; refuse other data unless the change is allowed."""
        self._unclaimed = None
        if stored is None:
            return
        if self._loader is None:
            self._unclaimed = stored, options, changes
            return
        if any(change.key == "seed" for change in changes):
            # The change is allowed: otherwise it was refused before.
            stored = {**stored, "seed": self._config.seed}
        allowed = any(change.changes_data for change in changes) or "data" in options.allow_changes
        try:
            self._loader.load_state_dict(stored, same_data=not allowed)
        except DataError as error:
            raise DataError(str(error), on_every_rank=True) from error


def run_lock_options(config: Config, mesh: Mesh) -> LockOptions:
    """Return how rank 0 locks the folders of a run, while the other ranks wait for it."""
    return LockOptions(config.checkpoint.take_over, 0.8 * mesh.timeout.total_seconds())


def newest(folder: str | os.PathLike[str]) -> str | None:
    """Return the tag that loading without a tag takes; None if nothing was saved. Not collective.

    This compares only the sizes of files; loading also compares checksums, and can choose another.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    return layout.newest(storage_at(folder))


def _run_state(state: dict[str, Any], client: Any) -> dict[str, Any]:
    """Return the state of the run; the Trainer of version 0.1 saved it as its client state."""
    older = client.get("trainer") if isinstance(client, dict) else None
    found: dict[str, Any] = state.get("run") or older or {}
    return found


def any_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the tag of the last checkpoint in a folder, damaged or not; None: there is none.

    Not collective.
    """
    tags = layout.complete_tags(storage_at(folder))
    return tags[-1] if tags else None


def _path(storage: Storage, tag: str) -> Path | str:
    return storage.root / tag if isinstance(storage, LocalStorage) else storage.full_path(tag)
