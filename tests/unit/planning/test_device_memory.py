"""The plan of a pipeline whose ranks have different devices."""

import json

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule
from pipemega.cli import main
from pipemega.config import load
from pipemega.errors import ConfigError
from pipemega.planning.estimate import Request, estimate

WIDTH = 64


def make(micro_batch_size, device="cpu"):
    """A large embedding on the CPU, and linears."""
    embedding = LayerSpec(nn.Embedding, 50_000, WIDTH, device=device)
    linears = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    tokens = torch.zeros(micro_batch_size, 16, dtype=torch.int64)
    labels = torch.zeros(micro_batch_size, 16, WIDTH)
    return PipelineModule([embedding, *linears], nn.MSELoss()), tokens, labels


def make_anywhere(micro_batch_size):
    """The same without devices."""
    return make(micro_batch_size, None)


def config_of(partition="auto", **mesh):
    return load(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "mesh": {"pipeline": 3, **mesh},
            "pipeline": {"partition": partition},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        }
    )


def report_of(limit=None, model="make", **settings):
    return estimate(Request(config_of(**settings), model=f"{__name__}:{model}", limit=limit))


def test_the_plan_has_the_memory_of_each_device():
    report = report_of()
    assert report.prediction.layout.bounds == (0, 1, 3, 5)
    assert [rank.device for rank in report.prediction.memory] == ["cpu", "cuda", "cuda"]


def test_only_the_memory_of_gpus_has_the_limit():
    report = report_of(limit=4 << 20)
    totals = [rank.total for rank in report.prediction.memory]
    assert totals[0] > 16 * 50_000 * WIDTH
    assert report.prediction.peak == max(totals[1:]) < 4 << 20
    assert report.fits
    assert not report_of(limit=4 << 20, model="make_anywhere", device="cpu").fits


@pytest.mark.parametrize(("device", "ranks"), [("cpu", [0]), ("cuda", [1, 2])])
def test_a_rank_needs_the_memory_of_a_pipeline_of_its_device(device, ranks):
    """Kernels of a CPU and of a GPU need different memory, and so do gloo and NCCL."""
    mixed = report_of(device=["cpu", "cuda", "cuda"])
    equal = report_of(model="make_anywhere", device=device, partition=[0, 1, 3, 5])
    for rank in ranks:
        assert mixed.prediction.memory[rank] == equal.prediction.memory[rank]


def test_the_command_shows_the_device_of_each_rank(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(device=["cpu", "cuda", "cuda"]).to_dict()))
    assert main(["plan", str(path), "--model", f"{__name__}:make"]) == 0
    text = capsys.readouterr().out
    assert "0 (cpu)" in text
    assert "2 (cuda)" in text


def test_a_device_list_that_contradicts_a_layer_is_refused():
    with pytest.raises(ConfigError, match="cannot be cut into stages on these devices"):
        report_of(device=["cuda", "cuda", "cpu"])
