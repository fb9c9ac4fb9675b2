"""How a run starts: from its own checkpoint, from another run's checkpoint, or at step 0."""

import logging
from typing import Any

from pipemega.checkpoint import newest
from pipemega.checkpoint.checkpointer import with_values_of
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.checkpoint.save_load import open_path
from pipemega.config import Config
from pipemega.distributed.mesh import Mesh, from_first
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.storage.filesystem import is_remote


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
    if not is_remote(settings.load) and find_deepspeed(settings.load, settings.load_tag):
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
