"""A pool of ranks that runs functions on all of them during a test session.

Starting four ranks that import torch takes 10 s; a fork server that has imported torch starts them
in less than 1 s. If a rank hangs or dies, only its test fails: the pool is restarted for the next.
"""

import importlib.util
import itertools
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")

# Modules that the fork server imports; its first user decides.
PRELOAD = [
    "pytest",
    "torch",
    # Of torch's optimizers, which import it when the first one is made.
    "torch._dynamo",
    "torch.distributed",
    "pipemega.engine.initialize",
    "pipemega.models",
    "pipemega.training",
]
# Optional; its import takes 4 s.
if importlib.util.find_spec("transformers") is not None:
    PRELOAD += ["transformers", "transformers.models.llama.modeling_llama"]
PRELOAD.append("tests.ranks.frozen_modules")

# How long the other ranks may run after one has failed: they may wait for it.
AFTER_FAILURE_SECONDS = 30.0


class RanksFailed(AssertionError):
    """Carries the error of each failed rank."""

    def __init__(self, errors: dict[int, tuple[str, str]]) -> None:
        self.errors = errors  # rank -> (str(exception) with its class, traceback)
        super().__init__("\n".join(f"--- rank {r}\n{text}" for r, (_, text) in errors.items()))


class RankPool:
    """Runs a function in `size` processes that form one world.

    Args:
        size: number of processes.
        backend: the default backend of `run`: "gloo", or one of `tests.ranks.nccl_like`.
    """

    def __init__(self, size: int = 4, backend: str = "gloo") -> None:
        self._size, self._backend = size, backend
        self._ranks: list[tuple[Any, Connection]] = []
        self._stores = itertools.count()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        backend: str | None = None,
    ) -> list[Any]:
        """Run `function(*args)` on ranks 0 to world_size - 1; return the results by rank.

        Raises:
            RanksFailed: some raised, died, or were not done in `timeout` seconds; or, if a rank has
                failed, `AFTER_FAILURE_SECONDS` later.
        """
        if len(self._ranks) < self._size:
            self._start()
        # Not deleted here: a rank that frees its store after its result needs the folder.
        store = os.path.join(self._folder.name, str(next(self._stores)))
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            pipe.send(((backend or self._backend, rank, world_size, store), function, args))
        results, errors = self._collect(world_size, timeout)
        if errors:
            if any(kind in ("hang", "died") for kind, _ in errors.values()):
                self.close()
            raise RanksFailed(errors)
        return [results[rank] for rank in range(world_size)]

    def _collect(
        self, world_size: int, timeout: float
    ) -> tuple[dict[int, Any], dict[int, tuple[str, str]]]:
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str]] = {}
        waiting = {self._ranks[rank][1]: rank for rank in range(world_size)}
        while waiting:
            seconds = min(timeout, AFTER_FAILURE_SECONDS) if errors else timeout
            ready = wait(list(waiting), seconds)
            if not ready:
                text = f"not done after {seconds} s"
                if errors:
                    text += f", rank {', '.join(map(str, sorted(errors)))} has failed"
                errors |= dict.fromkeys(waiting.values(), ("hang", text))
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    failed, value = True, ("died", "the process is gone")
                (errors if failed else results)[rank] = value
        return results, errors

    def _start(self) -> None:
        self.close()
        self._folder = tempfile.TemporaryDirectory()
        _CONTEXT.set_forkserver_preload(PRELOAD)
        for _ in range(self._size):
            here, there = _CONTEXT.Pipe()
            # Not a daemon: a rank may start processes that read data.
            process = _CONTEXT.Process(target=_serve, args=(there,))
            process.start()
            there.close()
            self._ranks.append((process, here))

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.ranks.nccl_like import process_group

    process_group.register()
    # A test of data workers may have started the fork server, which then blocks signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # CPU ranks, also on a machine with GPUs, which they would otherwise share.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # torch warns of an invalid ATEN_CPU_CAPABILITY in the first operation of a process. As an error
    # it would stop only those ranks that no earlier test has used.
    torch.backends.cpu.get_cpu_capability()
    warnings.simplefilter("error")
    # As in pyproject.toml.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
    torch.set_num_threads(1)
    while True:
        try:
            (backend, rank, world_size, store), function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            # A rank that fails at once must not break connections that are being established.
            dist.barrier()
            pipe.send((False, function(*args)))
        except BaseException as error:
            pipe.send((True, (f"{type(error).__name__}: {error}", traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
