"""Blip2 and SAM, which are not one stack of layers, under a pipeline: every gradient."""

import pytest

pytest.importorskip("transformers", reason="needs transformers")

import torch

from pipemega import from_pretrained
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.hf_check.model_check import check_model
from pipemega.hf_check.split_run import SplitSettings
from pipemega.parameters import is_kept_fp32
from tests.sampling import some_cases

WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def opt():
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=61, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=48,
        word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip


def t5():
    from transformers import T5Config

    return T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip


def blip2(language_model):
    from transformers import Blip2Config

    return Blip2Config(
        vision_config={**WIDTH, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8},
        qformer_config={**WIDTH, **NO_DROPOUT, "num_hidden_layers": 3, "vocab_size": 61},
        text_config=language_model.to_dict(),
        num_query_tokens=3,
        image_token_index=60,
        architectures=["Blip2ForConditionalGeneration"],
    )


def sam():
    # Six layers: eight stages on four ranks.
    from transformers import SamConfig

    return SamConfig(
        vision_config={
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 6, "mlp_dim": 48,
            "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "window_size": 3,
            "global_attn_indexes": [1], "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 16,
        },
        architectures=["SamModel"],
    )  # fmt: skip


CONFIGS = {"blip2": lambda: blip2(opt()), "blip2-t5": lambda: blip2(t5()), "sam": sam}


def assert_equal(result, gradients):
    (plain,) = result.comparisons
    assert plain.is_equal, plain.unequal[:3]
    assert len(plain.differences) >= gradients


@pytest.mark.parametrize(("name", "gradients"), some_cases([("blip2", 139), ("sam", 170)], 0))
def test_a_pipeline_gives_every_gradient_of_the_unsplit_model(pool, name, gradients):
    assert_equal(check_model(CONFIGS[name](), SplitSettings(pipeline=2), pool.run), gradients)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_schedule_gives_every_gradient_of_the_unsplit_model(pool, name, pipeline, schedule):
    settings = SplitSettings(pipeline=pipeline, schedule=schedule)
    assert_equal(check_model(CONFIGS[name](), settings, pool.run), 100)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_ranks_are_refused(name):
    net = from_pretrained(CONFIGS[name](), pretrained=False)
    with pytest.raises(ConfigError, match=r"has no plan for the family .* use mesh\.tensor = 1"):
        net.specs[1].build(Axis("tensor", (0, 1), 0), "meta")


@pytest.mark.parametrize("name", ["blip2", "sam"])
def test_every_parameter_is_in_one_segment_or_layer(name):
    """`query_tokens` and `pos_embed` belong to modules that contain layers."""
    net = from_pretrained(CONFIGS[name](), pretrained=False)
    names = [
        net.hf_name(f"layers.{position}.{inner}")
        for position, (spec, layer) in enumerate(zip(net.specs, net.meta_layers, strict=True))
        for inner, _ in layer.named_parameters()
        if inner not in spec.ties
    ]
    tied = [net.hf_name(f"layers.{p}.{n}") for p, s in enumerate(net.specs) for n in s.ties]
    assert len(names) == len(set(names))
    whole = type(net.description.model)(CONFIGS[name]())
    assert {*names, *tied} == {name for name, _ in whole.named_parameters()}


def test_a_module_with_layers_and_an_unknown_parameter_of_its_own_is_refused(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    build = LlamaForCausalLM.__init__

    def with_parameter(self, config):
        build(self, config)
        self.scale = torch.nn.Parameter(torch.ones(1))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_parameter)
    config = LlamaConfig(**WIDTH, num_hidden_layers=2, vocab_size=61)
    with pytest.raises(ConfigError, match=r"has a parameter of its own, scale"):
        from_pretrained(config, pretrained=False)


def test_a_loss_of_the_user_replaces_that_of_the_task():
    def own(output, labels):
        return output.sum()

    net = from_pretrained(CONFIGS["sam"](), pretrained=False, loss_fn=own)
    assert net.build_loss(Axis("tensor")) is own


def test_a_model_that_fails_without_its_layers_is_refused_by_name():
    """CTRL scales the output of its embeddings in place, which a placeholder does not allow."""
    from transformers import CTRLConfig

    config = CTRLConfig(vocab_size=61, n_embd=32, dff=48, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match=r"CTRLLMHeadModel cannot be split into a pip.*: its"):
        from_pretrained(config, task="causal-lm", pretrained=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blip2_in_half_precision_casts_what_its_q_former_returns(dtype):
    net = from_pretrained(CONFIGS["blip2"](), pretrained=False)
    tokens = torch.tensor([[60, 60, 60, 5, 6]])
    x = {"pixel_values": torch.randn(1, 3, 16, 16, dtype=dtype), "input_ids": tokens}
    for spec in net.specs:
        layer = spec.build(Axis("tensor"), "cpu")
        for parameter in layer.parameters():
            if not is_kept_fp32(parameter, dtype):
                parameter.data = parameter.data.to(dtype)
        x = layer(x)
    assert x.dtype == dtype
    assert x.isfinite().all()
