"""A pipeline with ranks on CPUs and on GPUs, compared with one rank on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipemega.distributed.mesh import pick_mixed_device
from tests.gpu.devices import launch, needs_gpus
from tests.ranks import mixed_devices

ONE_GPU = ["cuda", "cpu"]
TWO_GPUS = ["cpu", "cuda", "cuda"]
CASES = [
    pytest.param(ONE_GPU, {"schedule": "1f1b"}, marks=needs_gpus(1), id="1 GPU, 1f1b"),
    pytest.param(ONE_GPU, {"schedule": "zb-v"}, marks=needs_gpus(1), id="1 GPU, zb-v"),
    pytest.param(TWO_GPUS, {"schedule": "zb-h1"}, marks=needs_gpus(2), id="2 GPUs, zb-h1"),
    pytest.param(TWO_GPUS, {"shapes": "exchanged"}, marks=needs_gpus(2), id="2 GPUs, headers"),
    pytest.param(
        TWO_GPUS, {"optimizer_sync": "post_validate"}, marks=needs_gpus(2), id="post-validation"
    ),
]


def train(device: list[str], pipeline: dict[str, Any]) -> dict[str, Any]:
    """Train a model with tied layers on ranks of torchrun; return JSON values."""
    mesh = {"pipeline": len(device), "device": device, "timeout_seconds": 90}
    case = {"net": "tied_thrice", "mesh": mesh, "pipeline": pipeline, "gradient_clipping": 0.05}
    (result,) = mixed_devices.train_each([case], None)
    parameters = {name: value.tolist() for name, value in result["parameters"].items()}
    return {**result, "parameters": parameters}


@pytest.mark.gpu
@pytest.mark.parametrize(("device", "pipeline"), CASES)
def test_ranks_on_cpus_and_gpus_train_like_one_process(
    tmp_path: Path, device: list[str], pipeline: dict[str, Any]
) -> None:
    case = {"net": "tied_thrice", "mesh": {"device": "cpu"}, "gradient_clipping": 0.05}
    (oracle,) = mixed_devices.train_each([case], None)
    ended = launch(len(device), train, tmp_path / "result", device=device, pipeline=pipeline)
    assert ended.code == 0, ended.text
    for rank, kind in enumerate(device):
        found = json.loads((tmp_path / f"result.{rank}").read_text(encoding="utf-8"))
        assert found["of parameters"] == [kind]
        numpy.testing.assert_allclose(found["losses"], oracle["losses"], rtol=1e-10)
        for name, parameter in oracle["parameters"].items():
            numpy.testing.assert_allclose(found["parameters"][name], parameter, rtol=1e-9)


@pytest.mark.gpu
@needs_gpus(1)
def test_more_ranks_than_gpus_are_counted_on_this_machine() -> None:
    count = torch.cuda.device_count()
    if count == 1:
        pytest.skip("a rank that sees one GPU may have it for itself")
    wishes = ["cuda"] * (count + 1)
    assert pick_mixed_device(count - 1, wishes, ["a"] * len(wishes)).index == count - 1
    with pytest.raises(Exception, match=f"and it has {count} GPUs"):
        pick_mixed_device(count, wishes, ["a"] * len(wishes))
