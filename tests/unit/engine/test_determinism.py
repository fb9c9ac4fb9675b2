"""`training.deterministic_mode` in one process; tests/gpu has the test for a GPU."""

import logging
import os

import numpy
import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.config import load
from pipemega.engine.run.run_arguments import use_deterministic_algorithms
from pipemega.errors import ConfigError, PipemegaError
from tests.ranks.training_runs import settings, train

LOG = logging.getLogger("test")
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
ON = {"training": {"deterministic_mode": True}}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Restore the modes of the process, and its environment."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def config(**changes):
    return load(settings(**changes))


def test_two_runs_give_the_same_bits():
    changes = ON | {"model": {"attention_dropout": 0.1}, "bf16": {"enabled": True}}
    first, second = (train(settings(**changes), "float32") for _ in range(2))
    assert torch.are_deterministic_algorithms_enabled()
    assert (first["loss"], first["norm"]) == (second["loss"], second["norm"])
    for name, value in first["parameters"].items():
        assert numpy.array_equal(value, second["parameters"][name]), name


def test_without_the_key_the_mode_of_the_process_is_not_changed():
    use_deterministic_algorithms(config(), torch.device("cuda"), LOG)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not set(VARIABLES) & set(os.environ)
    torch.use_deterministic_algorithms(True)
    use_deterministic_algorithms(config(), torch.device("cpu"), LOG)
    assert torch.are_deterministic_algorithms_enabled()


def test_on_a_gpu_the_environment_is_set_and_values_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "CollnetChain, Ring")
    torch.backends.cudnn.benchmark = True
    use_deterministic_algorithms(config(**ON), torch.device("cuda"), LOG)
    assert [os.environ[name] for name in VARIABLES] == [":4096:8", "CollnetChain, Ring"]
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()


def test_a_script_that_used_cuda_before_is_warned(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    use_deterministic_algorithms(config(**ON), torch.device("cuda"), LOG)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of the job" in message


@pytest.mark.parametrize(
    ("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "Ring,Tree")]
)
def test_an_environment_without_a_fixed_order_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{name} is '{value}', with which .* unset it, or set"):
        use_deterministic_algorithms(config(**ON), torch.device("cuda"), LOG)
    assert not torch.are_deterministic_algorithms_enabled()


class Scatter(nn.Module):
    """Uses an operation that has no deterministic implementation, also on a CPU."""

    def forward(self, x):
        return x + torch.zeros_like(x).put_(torch.tensor([0, 0]), x.detach().flatten()[:2])


def test_an_operation_that_is_not_deterministic_is_an_error_that_names_it():
    net = PipelineModule([LayerSpec(nn.Linear, 3, 2), LayerSpec(Scatter)], loss_fn=nn.MSELoss())
    engine, *_ = initialize(
        net, {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}} | ON
    )
    with pytest.raises(PipemegaError, match=r"put_.* does not have a deterministic"):
        engine.train_batch(iter([(torch.ones(4, 3), torch.ones(4, 2))]))
