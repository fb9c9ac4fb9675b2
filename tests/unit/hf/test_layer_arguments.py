"""What a layer gets besides its hidden states: recorded once for the same inputs, and only then."""

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from tests.ranks.hf import tiny_models


def test_a_mask_that_a_loader_writes_again_is_recorded_again():
    """A loader may fill the same tensor for every batch: its id stays, its values do not."""
    net = pipemega.from_pretrained(tiny_models.config_of("llama"), pretrained=False)
    hidden, mask = torch.zeros(1, 4, 8), torch.tensor([[1, 1, 1, 0]])

    def recorded() -> torch.Tensor:
        _, kwargs = net._arguments.of(0, hidden, [], {"attention_mask": mask})
        return kwargs["attention_mask"]

    before = recorded()
    assert recorded() is before
    mask.copy_(torch.tensor([[1, 1, 1, 1]]))
    assert not torch.equal(recorded(), before)


def test_token_ids_reach_every_layer_that_reads_them():
    """DeepSeek-V4 chooses the experts of its first layers by the token ids."""
    sizes = {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16,
        "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 37,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "sliding_window": 4,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe"], "max_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.DeepseekV4Config(**sizes)
    config._attn_implementation = "eager"
    if transformers.__version__ == "5.9.0":
        with pytest.raises(
            ConfigError, match=r"layer 0 .* gets hidden states \[1, 4, 4, 32\], and"
        ):
            pipemega.from_pretrained(config, pretrained=False)
        pytest.skip("in this version the layers of DeepSeek-V4 have several streams")
    net = pipemega.from_pretrained(config, pretrained=False)
    assert net.description.reads_tokens
    ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    x = net.specs[0].build(Axis("tensor"), "cpu")(ids)
    _, kwargs = net._arguments.of(0, *x)
    assert torch.equal(kwargs["input_ids"], ids)


def test_an_image_classifier_whose_class_names_no_input_embeddings_is_split():
    """CLIP's classifier raises in `get_input_embeddings`."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(
        vision_config=vision, architectures=["CLIPForImageClassification"]
    )
    config.num_labels = 5
    net = pipemega.from_pretrained(config, pretrained=False)
    assert net.layer_names == ["Segment", *["CLIPEncoderLayer"] * 3, "Segment"]
