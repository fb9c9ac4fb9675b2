"""The profile of a Hugging Face model: the FLOPs of the unsplit model, without placeholders."""

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers
from torch.utils.flop_counter import FlopCounterMode

import pipemega
from tests.ranks.hf import tiny_models


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_flops_are_those_that_torch_counts_in_the_unsplit_model(family: str) -> None:
    config = tiny_models.config_of(family)
    net = pipemega.from_pretrained(config, pretrained=False, attn_implementation="eager")
    engine, *_ = pipemega.initialize(
        net,
        {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "flops_profiler": {"enabled": True, "detailed": False},
        },
    )
    ids = torch.zeros(2, 8, dtype=torch.int64)
    engine.train_batch(iter([(ids, ids)]))
    assert engine.steps.profiler is not None
    profile = engine.steps.profiler.profile
    assert profile is not None
    engine.close()
    whole = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        whole(input_ids=ids, use_cache=False)
    assert profile.forward_flops == counter.get_total_flops()
    kinds = {cost.kind for _, cost in profile.modules}
    assert not kinds & {"LayerPlaceholder", "ModuleStub"}
