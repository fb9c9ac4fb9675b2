"""How a run begins: from what it has saved, from another run's checkpoint, or anew."""

import logging
from contextlib import suppress
from typing import Any

from pipemega.checkpoint import newest
from pipemega.engine import Engine
from pipemega.errors import CheckpointError
from pipemega.mesh import from_first


def resume(engine: Engine, log: logging.Logger) -> dict[str, Any] | None:
    """Loads what the config asks for; collective.

    With `training.resume: "auto"` that is the newest complete checkpoint of `checkpoint.save`, so
    that a run that is started again goes on; otherwise, and where there is none, `checkpoint.load`.

    Returns:
        the trainer's own state; None in a new run.
    """
    config = engine.config.checkpoint
    if engine.config.training.resume == "auto":
        assert config.save is not None, "the config has been checked"
        folder = config.save
        tag = from_first(engine.mesh.world, lambda: newest(folder))
        if tag is not None:
            log.info(f"training.resume 'auto': {folder} has {tag}, so the run goes on from there")
            return _load(engine, folder, None, {}, log)
        instead = f"checkpoint.load ({config.load}) is loaded" if config.load else "a new run"
        log.info(f"training.resume 'auto': {folder} has no complete checkpoint: {instead}")
    elif config.save is not None and config.save != config.load:
        _warn_of_another_run(config.save, engine, log)
    if config.load is None:
        return None
    options = {
        "load_module_only": config.load_module_only,
        "load_optimizer_states": config.load_optimizer_states,
        "load_lr_scheduler_states": config.load_lr_scheduler_states,
        "strict": config.strict,
    }
    state = _load(engine, config.load, config.load_tag, options, log)
    # Of another model's parameters alone: a new run, and the records of the other not its own.
    return None if config.load_module_only else state


def _warn_of_another_run(folder: str, engine: Engine, log: logging.Logger) -> None:
    """Of what the run may write over, or delete as old."""
    if engine.mesh.rank == 0:
        # What cannot be read is no reason not to begin.
        with suppress(CheckpointError, OSError):
            tag = newest(folder)
            if tag is not None:
                log.warning(
                    f"checkpoint.save ({folder}) holds {tag} of a run before, and this one begins "
                    "anew: it replaces what has the same name. training.resume 'auto' would go on "
                    "from there; another folder would keep it"
                )


def _load(
    engine: Engine, folder: str, tag: str | None, options: dict[str, bool], log: logging.Logger
) -> dict[str, Any]:
    path, client = engine.load_checkpoint(folder, tag, **options)
    log.info(f"resumed from {path} at step {engine.global_steps}")
    state: dict[str, Any] = (client or {}).get("trainer", {})
    return state
