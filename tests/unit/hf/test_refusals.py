"""Hugging Face configs and inputs that cannot be trained are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.config.sections.hf_section import HFSection
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, DataError
from pipemega.hf import placeholders
from pipemega.hf.tasks import model_class_of
from tests.ranks.hf import tiny_models


def from_config(family: str, **changes: Any) -> Any:
    config = tiny_models.config_of(family, **changes)
    return pipemega.from_pretrained(config, pretrained=False)


def write_config(folder: Path, **content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_config_has_no_weights_to_load():
    with pytest.raises(ConfigError, match=r"a config, which has no weights.*pretrained=False"):
        pipemega.from_pretrained(tiny_models.config_of("llama"))


def test_the_argument_is_a_folder_or_a_config():
    with pytest.raises(ConfigError, match="takes a folder or a PretrainedConfig, not dict"):
        pipemega.from_pretrained({"model_type": "llama"})


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.json.*nothing is downloaded"):
        pipemega.from_pretrained(tmp_path)


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"config.json is damaged: Expecting value"):
        pipemega.from_pretrained(tmp_path)


def test_code_of_the_folder_is_not_run(tmp_path):
    folder = write_config(
        tmp_path, model_type="chatglm", auto_map={"AutoConfig": "configuration_chatglm.C"}
    )
    with pytest.raises(ConfigError, match=r"'chatglm' is Python code in the folder \(auto_map"):
        pipemega.from_pretrained(folder)


def test_an_unknown_family_is_named(tmp_path):
    folder = write_config(tmp_path, model_type="llama17")
    with pytest.raises(ConfigError, match="model_type 'llama17', which the installed"):
        pipemega.from_pretrained(folder)


def test_versions_out_of_range_are_refused(monkeypatch):
    # Not the name `transformers` of this file: the package replaces its module while it loads.
    module = placeholders.import_transformers()
    monkeypatch.setattr(module, "__version__", "4.57.1")
    with pytest.raises(ConfigError, match=r"transformers 4.57.1 is installed.*>= 5.9, < 6: pip"):
        placeholders.import_transformers()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: quantised weights cannot be trained",
        ),
        ("mixtral", {"output_router_logits": True}, "output_router_logits = true.*set"),
        ("opt", {"layerdrop": 0.1}, "layerdrop = 0.1: layers are skipped.*set layerdrop to 0"),
        ("whisper", {"decoder_layerdrop": 0.2}, "decoder_layerdrop = 0.2"),
        ("whisper", {"apply_spec_augment": True}, "apply_spec_augment = true.*set it to false"),
        ("vit", {"num_labels": 1}, "num_labels = 1, problem_type = 'regression'.*loss_fn=f"),
        ("vit", {"problem_type": "multi_label_classification"}, "has the loss of single_label"),
        ("llama", {"pad_token_id": 99}, "cannot build .* 'llama'.*AssertionError: Padding_idx"),
        ("gptj", {"rotary_dim": 16}, "A layer alone fails, too: RuntimeError"),
    ],
)
def test_settings_that_a_pipeline_does_not_carry_are_refused(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        from_config(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "message"),
    [
        ("llama", {}, 3, r"num_attention_heads \(4\) must be a multiple of the tensor ranks"),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8},
            6,
            r"num_key_value_heads \(4\) must be a multiple of the tensor ranks \(mesh.tensor = 6\)",
        ),
        ("gpt2", {}, 3, r"num_attention_heads \(4\) must be a multiple"),
        ("phi3", {}, 4, r"\(2\) must be a multiple of the tensor ranks \(mesh.tensor = 4\)"),
        ("bloom", {"slow_but_exact": True}, 2, "slow_but_exact = true.*set it to false"),
        ("llama", {"intermediate_size": 50}, 4, r"the output of mlp.gate_proj \(50\) must be"),
    ],
)
def test_sizes_that_do_not_divide_over_the_tensor_ranks_are_named(family, changes, ranks, message):
    net = from_config(family, **changes)
    with pytest.raises(ConfigError, match=message):
        net.specs[1].build(Axis("tensor", tuple(range(ranks)), 0), "meta")


def test_a_family_without_a_plan_is_not_sharded():
    net = from_config("llama")
    net.hf_config.base_model_tp_plan = None
    net.hf_config.model_type = "something"
    with pytest.raises(ConfigError, match=r"no plan for the family 'something'.*mesh.tensor = 1"):
        net.specs[1].build(Axis("tensor", (0, 1), 0), "meta")


def test_an_unknown_style_of_a_plan_is_named():
    net = from_config("llama")
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.up_proj": "diagonal"}
    net.hf_config.base_model_tp_plan = plan
    with pytest.raises(ConfigError, match=r"shards mlp.up_proj by the style 'diagonal'"):
        net.specs[1].build(Axis("tensor", (0, 1), 0), "meta")


@pytest.mark.parametrize("family", ["opt", "falcon-7b"])
def test_sequence_parallelism_is_refused_with_the_reason(family):
    config = tiny_models.config_of(family)
    net = pipemega.from_pretrained(config, pretrained=False, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"sequence_parallel does not work for the family.*: its"):
        net.specs[1].build(Axis("tensor", (0, 1), 0), "meta")


def test_an_attention_implementation_that_a_family_lacks_is_named():
    config = tiny_models.config_of("bloom")
    with pytest.raises(ConfigError, match=r"family 'bloom'.*attn_implementation 'sdpa'.*does not"):
        pipemega.from_pretrained(config, pretrained=False, attn_implementation="sdpa")


def test_state_between_layers_is_refused():
    config = transformers.Gemma4TextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, vocab_size=37, vocab_size_per_layer_input=37,
        hidden_size_per_layer_input=8, head_dim=8, global_head_dim=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be split into a pipeline: layer 0"):
        pipemega.from_pretrained(config, pretrained=False)


def test_embeddings_that_are_computed_without_a_tensor_are_named():
    config = transformers.RoFormerConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        vocab_size=37, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="RoFormerSinusoidalPositionalEmbedding gets no tensors"):
        pipemega.from_pretrained(config, task="causal-lm", pretrained=False)


def test_tasks_are_chosen_by_name_or_by_the_architecture():
    bert = tiny_models.config_of("bert")
    assert model_class_of(bert, None).__name__ == "BertForMaskedLM"
    assert model_class_of(tiny_models.config_of("whisper"), None).__name__.startswith("Whisper")
    with pytest.raises(ConfigError, match="unknown task 'chat'; the tasks are causal-lm"):
        model_class_of(bert, "chat")
    with pytest.raises(ConfigError, match="no model of the family 'llama' for task 'seq2seq'"):
        model_class_of(tiny_models.config_of("llama"), "seq2seq")
    for names, text in (
        (None, "no architecture"),
        (["BertForQuestionAnswering"], "BertForQuestionAnswering"),
    ):
        bert.architectures = names
        with pytest.raises(ConfigError, match=f"family 'bert' names {text}, which is no class of"):
            model_class_of(bert, None)
        with pytest.raises(ConfigError, match="causal-lm, masked-lm, sequence-classification"):
            model_class_of(bert, None)


def test_classification_is_the_task_of_a_config_only_if_the_config_names_such_a_class():
    """Nearly all families have such classes: a config without architectures stays a causal LM."""
    llama = tiny_models.config_of("llama")
    assert model_class_of(llama, None).__name__ == "LlamaForCausalLM"
    llama.architectures = ["LlamaForTokenClassification"]
    assert model_class_of(llama, None).__name__ == "LlamaForTokenClassification"


def test_a_reward_model_with_one_label_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"'regression'.*give from_pretrained\(..., loss_fn=f\)"):
        from_config("llama:sequence-classification", num_labels=1)


def test_token_files_are_refused_for_a_classifier(tmp_path: Path):
    """Their labels are token ids, not classes."""
    tiny_models.config_of("bert:token-classification").save_pretrained(tmp_path)
    section = HFSection(path=str(tmp_path), pretrained=False)
    assert section.sample_tokens() is None


def first_segment(family: str) -> Any:
    return from_config(family).specs[0].build(Axis("tensor"), "cpu")


TOKENS = torch.ones(1, 4, dtype=torch.long)
PACKED = torch.tensor([[0, 1, 0, 1]])


@pytest.mark.parametrize(
    ("family", "inputs", "message"),
    [
        ("llama", {"input_idx": TOKENS}, "has no input 'input_idx'; it has: attention_mask,"),
        ("llama", {"input_ids": TOKENS, "attention_mask": torch.ones(1, 4)}, "inputs are integers"),
        ("t5", {"input_ids": TOKENS}, "needs decoder_input_ids in the inputs"),
        ("opt", {"input_ids": TOKENS, "position_ids": PACKED}, "restart within a sample"),
        ("gpt-oss", {"input_ids": TOKENS, "position_ids": PACKED}, "restart within a sample"),
        ("bloom", {"input_ids": TOKENS, "position_ids": PACKED}, "restart within a sample"),
    ],
)
def test_inputs_that_would_be_ignored_are_refused(family, inputs, message):
    with pytest.raises(DataError, match=message):
        first_segment(family)(inputs)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "head_dim": 8}),
        ("Lfm2Config", {"layer_types": ["full_attention", "conv"]}),
        ("DogeConfig", {}),
        ("DeepseekV32Config", tiny_models.MLA | {"index_head_dim": 16, "index_n_heads": 2}),
    ],
)
def test_layers_that_see_other_positions_without_the_mask_take_no_packed_documents(name, changes):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)(**(tiny_models.SIZES | {"num_hidden_layers": 2} | changes))
    config.architectures = [name.replace("Config", "ForCausalLM")]
    net = pipemega.from_pretrained(config, pretrained=False)
    assert not net.follows_positions
    inputs = {"input_ids": TOKENS, "position_ids": PACKED}
    with pytest.raises(DataError, match="restart within a sample"):
        net.specs[0].build(Axis("tensor"), "cpu")(inputs)


def test_audio_in_half_precision_reaches_a_model_that_was_described_in_fp32():
    net = from_config("whisper")
    segment = net.specs[0].build(Axis("tensor"), "cpu").bfloat16()
    inputs, _ = tiny_models.batch_of(net.hf_config)
    message = segment({**inputs, "input_features": inputs["input_features"].bfloat16()})
    assert message[0].dtype == torch.bfloat16


def test_positions_of_packed_documents_are_followed_by_most_families():
    assert from_config("llama").follows_positions
    assert from_config("gpt2").follows_positions
    for family in ("bloom", "opt", "falcon", "gpt-oss", "t5"):
        assert not from_config(family).follows_positions, family
