"""How a run starts: from its own checkpoint, from another run's checkpoint, or at step 0."""

import logging
from typing import Any

from pipemega.checkpoint import any_checkpoint, newest
from pipemega.checkpoint.checkpointer import with_values_of
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.checkpoint.save_load import open_path
from pipemega.config import Config
from pipemega.distributed.mesh import Mesh, from_first
from pipemega.distributed.topology import Topology
from pipemega.engine.checkpointed_engine import CheckpointedEngine
from pipemega.errors import CheckpointError
from pipemega.storage.filesystem import is_remote


def resume(engine: CheckpointedEngine, log: logging.Logger) -> None:
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
    if not is_remote(settings.load) and find_deepspeed(settings.load, settings.load_tag):
        return None  # only its weights are loaded
    return settings.load, settings.load_tag


def refuse_other_run(config: Config, engine: CheckpointedEngine) -> None:
    """Refuse to replace the checkpoints of an earlier run, or to delete them as old; collective.

    Call it before the first step, if the run was not loaded from `checkpoint.save`.

    Raises:
        CheckpointError: `checkpoint.save` has checkpoints, and `checkpoint.overwrite` is false.
    """
    folder = config.checkpoint.save
    if folder is None or config.checkpoint.overwrite:
        return
    tag = from_first(engine.mesh.world, lambda: any_checkpoint(folder))
    if tag is not None:
        raise CheckpointError(
            f"checkpoint.save ({folder}) has {tag} of an earlier run, and this run does not "
            "continue it: set training.resume to 'auto' to continue it, choose another "
            "checkpoint.save to keep it, or set checkpoint.overwrite to true to replace it",
            on_every_rank=True,
        )


def log_iterator_position(engine: CheckpointedEngine, log: logging.Logger) -> None:
    """Log that the position of the caller's iterator is not restored."""
    step, samples = engine.global_steps, engine.consumed_samples
    log.info(
        f"resumed at step {step}: train_batch reads the caller's iterator, whose position is not "
        f"in the checkpoint. The caller must skip the {samples} samples that the run has consumed "
        "(engine.consumed_samples)"
    )


def _load(
    engine: CheckpointedEngine,
    folder: str,
    tag: str | None,
    options: dict[str, bool],
    log: logging.Logger,
) -> None:
    path, _ = engine.load_checkpoint(folder, tag, **options)
    log.info(f"resumed from {path} at step {engine.global_steps}")
