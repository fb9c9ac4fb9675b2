"""Checkpoints of a DeepSpeed engine, with DeepSpeed's arguments and return values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipemega.checkpoint import any_checkpoint
from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.compat.deepspeed.client_state import decoded, encoded
from pipemega.distributed.mesh import from_first
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.storage.filesystem import is_remote


class EngineCheckpoints:
    """Saves and loads `pipemega_engine`."""

    pipemega_engine: Engine

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run in pipemega's format, which loads on any mesh; return True.  Collective.

        Args:
            client_state: state of the caller, the same on every rank: tensors, numbers, text,
                containers of them, argparse namespaces and numpy arrays.
            exclude_frozen_parameters: has no effect: all parameters are saved.
        """
        self.pipemega_engine.save_checkpoint(
            save_dir, None if tag is None else str(tag), encoded(client_state or {}), save_latest
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """Load a checkpoint of `save_checkpoint`, or the weights of one of DeepSpeed.  Collective.

        Returns:
            its path and client state; (None, None), with a warning, if `load_dir` has no checkpoint
            and no `tag` is given.

        Raises:
            ConfigError: custom_load_fn.
            CheckpointError: as `pipemega.Engine.load_checkpoint`.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported: load_module_strict=False "
                "loads the parameters that match",
                on_every_rank=True,
            )
        world = self.pipemega_engine.mesh.world
        if tag is None and from_first(world, lambda: _is_empty(load_dir)):
            if world.rank == 0:
                get_logger().warning(f"{load_dir} has no checkpoint: nothing is loaded")
            return None, None
        path, client = self.pipemega_engine.load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            load_module_only=load_module_only,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            strict=load_module_strict,
        )
        return str(path), decoded(client) or {}


def _is_empty(folder: str | Path) -> bool:
    if any_checkpoint(folder) is not None:
        return False
    return is_remote(folder) or find_deepspeed(folder) is None
