"""Runs a function on several gloo ranks, which are processes on this machine."""

import logging
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from typing import Any, Protocol

import torch.distributed as dist

from pipemega.errors import ConfigError, PeerError, PipelineError, PipemegaError

# Imported once, by the process from which the ranks are forked.
_PRELOAD = (
    "torch._dynamo",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "pipemega.hf_check.split_run",
)
_TIMEOUT = 300.0


class RunRanks(Protocol):
    """Runs `function(*args)` on ranks 0 to world_size - 1; returns the results by rank."""

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any
    ) -> Sequence[Any]: ...


def prepare_ranks() -> None:
    """Start the process that imports the modules of the ranks; do not wait for it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    ensure_running()


def launch_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `world_size` processes that form one world.

    Raises:
        PipemegaError: the error of a rank.
    """
    context = multiprocessing.get_context("forkserver")
    # Plain pickle copies tensors; multiprocessing would share their memory.
    call = pickle.dumps((function, args))
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                world = (rank, world_size, os.path.join(folder, "store"))
                process = context.Process(target=_run_rank, args=(there, world, call))
                process.start()
                there.close()
                ranks.append((process, here))
            return _collect([pipe for _, pipe in ranks])
        finally:
            for process, pipe in ranks:
                pipe.close()
                process.kill()
                process.join()


def _collect(pipes: Sequence[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), _TIMEOUT)
        if not ready:
            raise PipelineError(f"ranks {sorted(waiting.values())} hang: no result in {_TIMEOUT} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                failed, value = True, PipelineError(f"the process of rank {rank} has died")
            if failed:
                errors.append(value)
            else:
                results[rank] = value
    if errors:
        # The other ranks report that a peer has failed.
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(pipe: Connection, world: tuple[int, int, str], call: bytes) -> None:
    rank, world_size, store = world
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The lines of an ordinary run are not of interest here.
    logging.disable(logging.WARNING)
    try:
        function, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_TIMEOUT / 2),
        )
        answer = (False, function(*args))
    except PipemegaError as error:
        answer = (True, type(error)(str(error)))
    except BaseException:
        answer = (True, ConfigError(f"rank {rank} failed:\n{traceback.format_exc()}"))
    pipe.send_bytes(pickle.dumps(answer))
    with suppress(EOFError):
        # Until the parent has all results, the connections stay open for the other ranks.
        pipe.recv_bytes()
