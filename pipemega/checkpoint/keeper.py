"""Saving and loading for one engine: its parts, and what the options make of them."""

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipemega.checkpoint import comparison, folder, store, tensors
from pipemega.checkpoint.agreement import Agreement
from pipemega.checkpoint.background import Background, Staging
from pipemega.checkpoint.changes import Change, changes, judged
from pipemega.checkpoint.disk import Disk, LocalDisk, disk_at
from pipemega.checkpoint.folder import Retention
from pipemega.checkpoint.options import LoadOptions
from pipemega.checkpoint.pieces import Piece
from pipemega.checkpoint.store import Opened, RunState
from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.errors import CheckpointError, DataError
from pipemega.mesh import Mesh
from pipemega.optimizer import OptimizerStep
from pipemega.pipeline.build import LocalModel
from pipemega.random import derive_seed, rng_state, seed_streams, set_rng_state

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counters:
    """How far a run has come: batches, and samples over all data ranks."""

    global_steps: int
    consumed_samples: int


@dataclass(frozen=True)
class Loaded:
    """What came of loading.

    Args:
        path: the checkpoint's folder.
        client: what the caller gave when it was saved.
        counters: how far that run had come; None if only the module was loaded.
    """

    path: Path | str
    client: Any
    counters: Counters | None


class Checkpoints:
    """Writes and reads all that the next step of an engine depends on; collective.

    Args:
        config, mesh, model, step, loader: the engine's.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: LocalModel,
        step: OptimizerStep | None,
        loader: BatchLoader | None,
    ) -> None:
        self._config, self._mesh, self._model = config, mesh, model
        self._step, self._loader = step, loader
        settings = config.checkpoint
        self._retention = Retention(settings.keep_last, settings.keep_every)
        self._background = Background(mesh.world, mesh.timeout)
        if settings.in_background:
            self._background.meet()
        self._staging = Staging(mesh.device)

    def save(
        self,
        place: str | os.PathLike[str],
        tag: str | None,
        client: Any,
        counters: Counters,
        *,
        point: bool = True,
    ) -> Path | str:
        """Writes a checkpoint, or has it written; returns where it is, or will be.

        Raises:
            CheckpointError: a rank could not write; what was saved before is untouched.
        """
        started = time.perf_counter()
        failed = self._failed()
        disk, settings = disk_at(place), self._config.checkpoint
        agree = Agreement(self._mesh.world, disk)
        tag = store.one_tag(
            tag or folder.step_tag(counters.global_steps), agree, settings.tag_validation
        )
        state = self._state(agree, client, counters)
        write = partial(store.save, disk, tag, state, point=point, retention=self._retention)
        if failed is not None and self._mesh.rank == 0:
            _log.warning("%s; this time the run waits until it is saved", failed)
        if not settings.in_background or failed is not None:
            write(self._mesh.world)
            return _path(disk, tag)
        state.tensors = self._staging.copy(state.tensors)
        self._background.start(lambda axis: write(axis))
        waited = time.perf_counter() - started
        if self._mesh.rank == 0:
            _log.info("saving %s in the background: %.3f s of the run", disk.where(tag), waited)
        return _path(disk, tag)

    def finish(self) -> None:
        """Waits until what is written in the background is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        failed = self._failed()
        if failed is not None:
            raise failed

    def _failed(self) -> CheckpointError | None:
        """Waits for what is being written, and returns why it could not be; raises what else."""
        error = self._background.wait()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error

    def _state(self, agree: Agreement, client: Any, counters: Counters) -> RunState:
        mesh = self._mesh
        own = {
            "rng": rng_state(mesh.device),
            "buffers": tensors.own_buffers(self._model, mesh),
        }
        pieces = tensors.logical_tensors(self._model, self._step, mesh)
        return RunState(
            tensors={name: piece.outgoing for name, piece in pieces.items()},
            shared={
                "mesh": str(mesh.topology),
                "global_steps": counters.global_steps,
                "consumed_samples": counters.consumed_samples,
                "optimizer_step": tensors.step_state(self._step),
                "loader": None if self._loader is None else self._loader.state_dict(),
                "config": self._config.to_dict(),
            },
            own=store.packed(own),
            client=agree.together(lambda: store.packed_client(client) if agree.is_first else b""),
        )

    def load(self, place: str | os.PathLike[str], tag: str | None, options: LoadOptions) -> Loaded:
        """Continues where a checkpoint was written, or takes of it what `options` say.

        Nothing is read into a tensor of the run before all of this is known to fit.

        Raises:
            CheckpointError: it is missing, half-written, damaged, of another model, or of a run
                that was configured otherwise; on every rank.
        """
        started = time.perf_counter()
        # What could not be written has been said; it is no reason not to go back.
        self._failed()
        disk = disk_at(place)
        agree = Agreement(self._mesh.world, disk)
        opened = store.choose(disk, tag, agree, verify=options.verify)
        same_mesh = opened.found.state["mesh"] == str(self._mesh.topology)

        def look() -> tuple[list[Change], dict[str, Any] | None, Any]:
            takes_own = same_mesh and not options.module_only
            own = opened.own(self._mesh.rank) if takes_own else None
            return self._changes(opened, options), own, opened.client()

        found, own, client = agree.together(look)
        pieces = self._room(opened, options, agree)
        if not options.module_only:
            self._move_loader(opened.found.state["loader"], options, found)
        store.read(opened, pieces, agree)
        self._restore(opened.found.state, pieces, own, options)
        if self._mesh.rank == 0:
            took = store.rate(opened.found.size, time.perf_counter() - started)
            then = "" if same_mesh else f" (from the mesh {opened.found.state['mesh']})"
            _log.info("loaded %s%s: %s", opened.where, then, took)
        return Loaded(_path(disk, opened.found.tag), client, self._counters(opened, options))

    def _changes(self, opened: Opened, options: LoadOptions) -> list[Change]:
        """What is new in the config, said or refused; nothing where only the module is loaded."""
        if options.module_only:
            return []
        found = changes(opened.found.state["config"], self._config)
        allowed = options.allow_changes if options.strict else ("model", *options.allow_changes)
        said = judged(found, allowed, opened.where)
        if said is not None and self._mesh.rank == 0:
            _log.info(said)
        if self._step is not None and options.loads_optimizer:
            tensors.check_optimizer(opened.found.state["optimizer_step"], self._step)
        return found

    def _room(self, opened: Opened, options: LoadOptions, agree: Agreement) -> dict[str, Piece]:
        """The tensors to read into, if all, or what `options` say, fits."""
        stored, step = opened.tensors.tensors, self._step
        pieces = tensors.model_tensors(self._model, step, self._mesh)
        replica = self._mesh.data.rank > 0 or self._mesh.tensor.rank > 0
        differ = comparison.differences(stored, pieces, replica, agree)
        if options.strict:
            comparison.refuse(opened.where, differ)
        elif agree.is_first:
            comparison.report(opened.where, differ)
        left_out = {difference.name for difference in differ}
        fits = {k: v for k, v in stored.items() if tensors.parameter_of(k) not in left_out}
        if step is not None and options.loads_optimizer:
            pieces |= tensors.optimizer_room(fits, self._model, step, self._mesh)
        return {key: piece for key, piece in pieces.items() if key in fits}

    def _restore(
        self,
        state: dict[str, Any],
        pieces: dict[str, Piece],
        own: dict[str, Any] | None,
        options: LoadOptions,
    ) -> None:
        buffers = {} if own is None else own["buffers"]
        tensors.restore(pieces, state["optimizer_step"], buffers, self._model, self._step, options)
        if own is not None:
            set_rng_state(own["rng"], self._mesh.device)
        elif not options.module_only:
            # The streams of ranks that there were not: new ones, the same on tensor ranks.
            mesh, samples = self._mesh, state["consumed_samples"]
            place = (mesh.pipeline.rank, mesh.data.rank)
            seed_streams(derive_seed(self._config.seed, "resumed", samples, *place), mesh.device)

    def _move_loader(
        self, there: dict[str, Any] | None, options: LoadOptions, changed: list[Change]
    ) -> None:
        """To the sample that comes next; the same data, unless another is meant."""
        if self._loader is None or there is None:
            return
        if any(change.key == "seed" for change in changed):
            # It is meant, or it would have been refused.
            there = {**there, "seed": self._config.seed}
        meant = any(change.is_of_the_data for change in changed)
        meant |= "data" in options.allow_changes
        try:
            self._loader.load_state_dict(there, same_data=not meant)
        except DataError as error:
            raise DataError(
                f'{error}; in a config that is checkpoint.allow_changes ["data"]',
                on_every_rank=True,
            ) from error

    def _counters(self, opened: Opened, options: LoadOptions) -> Counters | None:
        if options.module_only:
            return None
        state = opened.found.state
        return Counters(int(state["global_steps"]), int(state["consumed_samples"]))


def newest(place: str | os.PathLike[str]) -> str | None:
    """The tag that loading without one takes; None where nothing was ever saved. Not collective.

    It goes by the sizes of files; loading also compares their sums, and may yet take another.

    Raises:
        CheckpointError: something was saved, and nothing of it is whole.
    """
    return folder.newest(disk_at(place))


def _path(disk: Disk, tag: str) -> Path | str:
    return disk.root / tag if isinstance(disk, LocalDisk) else disk.where(tag)
