"""Variables of CUDA that are set before CUDA starts, and the installed driver."""

import os
import sys
from types import SimpleNamespace

import pytest

from pipemega import cuda_settings

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*NAMES, *cuda_settings._SIZES):
        monkeypatch.delenv(name, raising=False)
    # Unset variables that the code under test sets are removed again.
    monkeypatch.setattr(os, "environ", dict(os.environ))


def start_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))


@pytest.mark.parametrize("size", ["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_jobs_of_several_ranks_load_all_kernels_first_and_have_a_queue_for_each_stream(size):
    os.environ[size] = "4"
    cuda_settings.set_defaults()
    assert [os.environ[name] for name in NAMES] == ["32", "EAGER"]
    assert (cuda_settings.hardware_queues(), cuda_settings.loads_lazily()) == (32, False)


def test_values_of_the_user_stay():
    os.environ |= {"WORLD_SIZE": "4", NAMES[0]: "1", NAMES[1]: "LAZY"}
    cuda_settings.set_defaults()
    assert (cuda_settings.hardware_queues(), cuda_settings.loads_lazily()) == (1, True)


def test_one_rank_keeps_the_defaults_of_cuda():
    os.environ["WORLD_SIZE"] = "1"
    cuda_settings.set_defaults()
    assert not set(NAMES) & os.environ.keys()


def test_variables_that_come_too_late_are_not_set(monkeypatch):
    start_cuda(monkeypatch)
    os.environ["WORLD_SIZE"] = "4"
    cuda_settings.set_defaults()
    assert not set(NAMES) & os.environ.keys()
    assert (cuda_settings.hardware_queues(), cuda_settings.loads_lazily()) == (8, True)


@pytest.mark.parametrize(
    ("driver", "cuda", "reason"),
    [
        (None, "13.0", ""),
        ("580.65.06", "13.0", ""),
        (
            "535.183.01",
            "13.0",
            "torch 2.13.0 is built for CUDA 13.0, which needs NVIDIA driver 580 or newer, and "
            "driver 535.183.01 is installed: install a newer driver, or a torch that is built for "
            "CUDA 12 (docs/install.md)",
        ),
        (
            "390.1",
            "12.6",
            "torch 2.13.0 is built for CUDA 12.6, which needs NVIDIA driver 525 or newer, and "
            "driver 390.1 is installed: install a newer driver (docs/install.md)",
        ),
        (
            "580.65.06",
            None,
            "torch 2.13.0 is built without CUDA, and NVIDIA driver 580.65.06 is installed: install "
            "torch from the index of a CUDA version (docs/install.md)",
        ),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_named_with_what_to_install(
    tmp_path, monkeypatch, driver, cuda, reason
):
    file = tmp_path / "version"
    if driver is not None:
        file.write_text(f"{driver}\n")
    monkeypatch.setattr(cuda_settings, "_DRIVER_FILE", file)
    assert cuda_settings.why_unusable("2.13.0", cuda) == reason
