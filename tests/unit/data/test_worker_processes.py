"""Worker processes: their samples, their errors, and their end."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pipemega.engine.initialize import initialize
from pipemega.engine.run.run_arguments import build_mesh_of
from pipemega.errors import ConfigError, DataError
from tests.ranks.pool import PRELOAD
from tests.unit.data.augmented_data import (
    Augmented,
    Failing,
    Killed,
    Sleeping,
    make_loader,
    mix_samples,
    rows_of,
)

# The fork server of the pool of ranks: workers start in 0.1 s.
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


def wait_for_end(processes, seconds=10):
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.05)


def test_worker_processes_read_the_samples_that_the_rank_would_read():
    expected = rows_of(make_loader(Augmented(), collate_fn=mix_samples), 7)
    state, rows = None, []
    for steps, workers, prefetch in ((3, 1, 0), (4, 2, 5)):
        loader = make_loader(
            Augmented(), collate_fn=mix_samples, num_workers=workers, prefetch=prefetch, state=state
        )
        before = torch.default_generator.get_state()
        rows += rows_of(loader, steps)
        assert torch.equal(before, torch.default_generator.get_state())
        state = loader.state_dict()
        loader.close()
    assert rows == expected


def test_an_error_in_a_worker_names_the_sample_and_shows_the_users_traceback():
    loader = make_loader(Failing(), shuffle=False, num_workers=2)
    rows_of(loader)
    for _ in range(2):  # asked again, it does not skip the sample
        with pytest.raises(DataError) as caught:
            rows_of(loader)
        first, *trace = str(caught.value).splitlines()
        assert first == (
            "sample 5 of Failing could not be read: OSError: the picture cannot be decoded"
        )
        assert trace[0] == "Traceback (most recent call last):"
        assert "augmented_data.py" in trace[1]
        assert "in decode" in trace[3] + trace[4]
    assert loader.consumed_samples == 4
    loader.close()


def test_a_killed_worker_is_an_error_that_names_the_samples():
    loader = make_loader(Killed(), shuffle=False, num_workers=1)
    with pytest.raises(
        DataError,
        match=r"a worker process ended while samples 0, 1 of Killed were read: DataLoader worker "
        r"\(pid\(s\) \d+\) exited unexpectedly; .*lower data.num_workers.*__name__ == '__main__'",
    ):
        rows_of(loader)
    loader.close()


def iterators():
    """Return all iterators with worker processes."""
    return [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]


def test_a_loader_is_deleted_although_a_killed_worker_holds_a_lock():
    """A worker was killed while it read the event of its iterator, which waited for it forever."""
    before = iterators()
    loader = make_loader(Augmented(8), num_workers=1)
    rows_of(loader)
    (iterator,) = (each for each in iterators() if each not in before)
    iterator._workers_done_event._cond.acquire()
    loader.close()
    thread = threading.Thread(target=iterator._shutdown_workers, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_timeout_names_the_samples_and_ends_the_workers(tmp_path):
    data = Sleeping(tmp_path)
    loader = make_loader(data, shuffle=False, num_workers=2, timeout_seconds=6)
    rows_of(loader)
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"no data came within 6 s: samples 4, 5 of Sleeping are being read by 2 wo"
    ):
        rows_of(loader)
    # The other ranks wait for this error: it does not wait for the workers.
    assert time.monotonic() - started < 30
    wait_for_end(data.processes())


def test_a_dataset_that_cannot_be_pickled_is_refused():
    class Local(Augmented):
        pass

    loader = make_loader(Local(), num_workers=1)
    with pytest.raises(
        DataError,
        match=r"data.num_workers is 1, but Local or its collate_fn cannot be sent to a worker "
        r"process: .*Local.*; define their classes and functions at the top of a module",
    ):
        next(loader)


SCRIPT = """
import os, signal, sys, time
from tests.unit.data.augmented_data import Sleeping, make_loader, rows_of

def train():
    loader = make_loader(Sleeping(sys.argv[1]), shuffle=False, num_workers=2, timeout_seconds=120)
    rows_of(loader)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    # As torchrun and job schedulers: to all processes of the rank.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.2)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 8})
    print(len(rows_of(loader)))
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 0})
    rows_of(loader)

if __name__ == "__main__":
    train()
"""


def run_script(folder, text, *arguments, code):
    script = folder / "train.py"
    script.write_text(text)
    (folder / "processes").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, script, folder / "processes", *arguments],
        timeout=150, capture_output=True, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def test_blocked_workers_end_with_a_killed_rank(tmp_path):
    run_script(tmp_path, SCRIPT, "kill", code=-signal.SIGKILL)
    processes = Sleeping(tmp_path / "processes").processes()
    assert processes
    wait_for_end(processes)


@pytest.mark.sweep
def test_workers_ignore_a_signal_to_all_processes_of_the_rank_and_end_when_it_exits(tmp_path):
    assert run_script(tmp_path, SCRIPT, "exit", code=0).stdout == "4\n"
    wait_for_end(Sleeping(tmp_path / "processes").processes())


UNGUARDED = """
import pipemega
from pipemega import PipelineModule, LayerSpec
from torch import nn
from tests.unit.data.augmented_data import Augmented

with pipemega.run():
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], loss_fn=nn.functional.mse_loss)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data": {"num_workers": 1},
    }
    engine, *_ = pipemega.initialize(net, config, Augmented())
    engine.train_batch()
"""


def test_a_worker_process_that_imports_the_script_does_not_start_a_rank(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    message = r"initialize\(\) was called in a worker process, .* below `if __name__ == '__main__'"
    for start in (lambda: build_mesh_of(None), lambda: initialize(None, {})):
        with pytest.raises(ConfigError, match=message):
            start()


@pytest.mark.sweep
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    errors = run_script(tmp_path, UNGUARDED, code=1).stderr
    assert "initialize() was called in a worker process, which imports the script" in errors
    assert "`if __name__ == '__main__':`" in errors.splitlines()[-1]
