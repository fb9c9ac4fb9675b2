"""pretrain_gpt.py's steps with a Hugging Face model: from a folder of weights, and from scratch."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.ranks.pool import RankPool
from tests.ranks.training import hf_pretraining

transformers = pytest.importorskip("transformers", reason="Hugging Face models need transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    hf_pretraining.make_folder(folder / "model")
    return folder


def test_the_first_loss_is_that_of_transformers_on_the_same_samples(
    pool: RankPool, folder: Path
) -> None:
    first, other = pool.run(2, hf_pretraining.train, str(folder), {"pipeline": 2}, True)
    inputs, labels = map(torch.tensor, zip(*first["samples"], strict=True))
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        logits = model(inputs).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert first["losses"][0] == pytest.approx(wanted, rel=1e-5)
    assert first["losses"][1] < wanted
    assert first["vocabulary"] == 320
    # Only rank 0 records the FLOPs.
    assert first["flops"] > 6 * sum(p.numel() for p in model.model.layers.parameters())
    assert other["flops"] == 0.0


def test_new_weights_are_the_same_on_every_mesh(pool: RankPool, folder: Path) -> None:
    (pipeline, _), (tensor, _) = (
        pool.run(2, hf_pretraining.train, str(folder), mesh, False)
        for mesh in ({"pipeline": 2}, {"tensor": 2})
    )
    assert tensor["samples"] == pipeline["samples"]
    assert tensor["losses"] == pytest.approx(pipeline["losses"], rel=1e-5)
