"""Text of a model with adapters: by transformers' `generate`, and from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipemega import initialize
from pipemega.hf.hf_module import from_pretrained, unsplit_model
from pipemega.training.trained_model import find_model, open_model
from tests.unit.lora.adapted_models import batch, gpt_engine, hf_logits, hf_model, logits_of

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_unsplit_model_of_transformers_has_the_adapters_merged(
    family: str, tmp_path: Path
) -> None:
    hf_model(family).save_pretrained(tmp_path)
    net = from_pretrained(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 2, "lora": {"r": 2, "alpha": 6}}
    engine, *_ = initialize(net, config)
    (stage,) = engine.module
    for name, parameter in stage.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    layers = {int(position): layer for position, layer in stage.layers.items()}  # type: ignore[operator,union-attr]
    got = hf_logits(unsplit_model(net, layers))
    torch.testing.assert_close(got, logits_of(engine), rtol=0, atol=1e-4)
    assert (hf_logits(hf_model(family)) - got).abs().max() > 0.1


def test_a_checkpoint_with_adapters_is_opened_without_the_file_that_they_started_from(
    tmp_path: Path,
) -> None:
    engine = gpt_engine("gpt2", lora={"r": 2, "alpha": 4})
    for _ in range(2):
        engine.train_batch(iter([batch()]))
    path = engine.save_checkpoint(tmp_path / "run")
    source = find_model(str(path))
    lora = {**source.config["lora"], "path": str(tmp_path / "deleted")}
    source = replace(source, config={**source.config, "lora": lora})
    config = source.config_for(1, ())
    _, opened = open_model(source, config, engine.mesh)
    assert torch.equal(logits_of(opened), logits_of(engine))
