"""Exports of checkpoints of one rank: names, bytes, configs, and exports that are refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers
from safetensors.torch import load_file

import pipemega
from pipemega.cli import main
from pipemega.errors import CheckpointError
from pipemega.hf.tasks import model_class_of
from pipemega.hf.weights import export
from pipemega.hf.weights.checkpoint_model import export_checkpoint
from pipemega.hf_check.split_run import KeepFloat64
from pipemega.models import GPTConfig, gpt
from tests.ranks.hf import tiny_models
from tests.ranks.hf_check import test_special_models

IN_CI = ("llama-tied", "gpt2", "deepseek-v3", "t5")
GPT2 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 8,
    "vocab_size": 50,
    "make_vocab_size_divisible_by": 32,
    # So that attention and logits are far from uniform.
    "init_method_std": 0.5,
}
LLAMA = GPT2 | {
    "position_embedding_type": "rope",
    "rotary_base": 5000.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 24,
    "untie_embeddings_and_output_weights": True,
}

EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 0.25,
    "moe_z_loss_coeff": 0.01,
}
MIXTRAL = LLAMA | EXPERTS
QWEN3_MOE = MIXTRAL | {"qk_layernorm": True}


def run_config(**changes):
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "mesh": {"device": "cpu"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    } | changes


def save_folder(family, folder, dtype=torch.float32, **options):
    """Write a folder with random weights, buffers included; return the model."""
    transformers.utils.logging.disable_progress_bar()
    model = tiny_models.whole_model(tiny_models.config_of(family)).to(dtype)
    with torch.no_grad():
        for name, buffer in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(folder, **options)
    return model


def checkpoint_of(net, folder, **changes):
    engine, *_ = pipemega.initialize(net, run_config(**changes))
    engine.save_checkpoint(folder, tag="first")
    engine.close()
    return engine


def tensors_of(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def json_of(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    "family",
    [
        family if family in IN_CI else pytest.param(family, marks=pytest.mark.sweep)
        for family in tiny_models.CONFIGS
    ],
)
def test_a_folder_that_is_loaded_saved_and_exported_has_the_same_tensors_and_config(
    family, tmp_path
):
    source, out = tmp_path / "source", tmp_path / "out"
    save_folder(family, source, max_shard_size="60KB")
    checkpoint_of(pipemega.from_pretrained(source), tmp_path / "checkpoint")
    export_checkpoint(str(tmp_path / "checkpoint"), out, max_shard_size="60KB")
    before, after = tensors_of(source), tensors_of(out)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    index = json_of(out, "model.safetensors.index.json")
    expected = json_of(source, "model.safetensors.index.json")
    assert index["metadata"] == expected["metadata"]
    # transformers puts all experts of a layer into one file.
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert json_of(out) == json_of(source)
    assert pipemega.from_pretrained(out).source is not None
    assert {path.name for path in out.glob("*.json")} == {p.name for p in source.glob("*.json")}


@pytest.fixture(scope="module")
def llama_checkpoint(tmp_path_factory):
    """A checkpoint of a tiny Llama, with the folder from which it was loaded."""
    folder = tmp_path_factory.mktemp("llama")
    save_folder("llama", folder / "source")
    (folder / "source/tokenizer.json").write_text("{}")
    (folder / "source/generation_config.json").write_text('{"max_length": 7}')
    checkpoint_of(pipemega.from_pretrained(folder / "source"), folder / "checkpoint")
    return folder


def test_a_masked_language_model_becomes_a_classifier_with_a_new_head(tmp_path, caplog):
    """The usual fine-tuning: load the weights of a pretraining, with labels of another number."""
    model = save_folder("bert", tmp_path / "pretrained")
    net = pipemega.from_pretrained(
        tmp_path / "pretrained", task="sequence-classification", num_labels=5
    )
    assert "contains a BertForMaskedLM, without" in caplog.text
    assert "classifier.weight" in caplog.text
    checkpoint_of(net, tmp_path / "checkpoint")
    written = export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    assert written.class_name == "BertForSequenceClassification"
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert exported.config.num_labels == 5
    assert exported.classifier.weight.shape == (5, 32)
    for name, tensor in model.bert.state_dict().items():
        assert torch.equal(exported.bert.state_dict()[name], tensor), name


def test_the_command_exports_and_says_what_it_wrote(llama_checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["hf", "export", str(llama_checkpoint / "checkpoint"), str(out)]
    assert main([*arguments, "--dtype", "bfloat16", "--max-shard-size", "30KB"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM, 0.1 MB bfloat16 in 3 files" in printed
    assert "tokenizer: tokenizer.json" in printed
    assert (out / "tokenizer.json").read_text() == "{}"
    assert json_of(out, "generation_config.json") == {"max_length": 7}
    assert json_of(out)["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    source = tensors_of(llama_checkpoint / "source")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source[name].bfloat16()), name


def test_without_the_source_folder_the_export_has_no_tokenizer_and_says_so(
    llama_checkpoint, tmp_path, capsys
):
    moved = tmp_path / "moved"
    shutil.copytree(llama_checkpoint / "source", moved)
    checkpoint_of(pipemega.from_pretrained(moved), tmp_path / "checkpoint")
    moved.rename(tmp_path / "elsewhere")
    assert main(["hf", "export", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"or copy a tokenizer file to {tmp_path}/out/tokenizer.json" in printed
    assert json_of(tmp_path / "out") == json_of(llama_checkpoint / "source")
    arguments = ["hf", "export", str(tmp_path / "checkpoint/first"), str(tmp_path / "again")]
    assert main([*arguments, "--source", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "again/tokenizer.json").exists()


def test_an_export_in_half_precision_keeps_the_float32_tensors_of_the_family(tmp_path):
    save_folder("deepseek-v3", tmp_path / "source")
    checkpoint_of(
        pipemega.from_pretrained(tmp_path / "source"),
        tmp_path / "checkpoint",
        bf16={"enabled": True},
    )
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    kept = {name for name, t in tensors_of(tmp_path / "out").items() if t.dtype == torch.float32}
    assert kept
    assert all(name.endswith("e_score_correction_bias") for name in kept)
    assert json_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_a_folder_with_files_is_not_overwritten(llama_checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out exists and is not empty"):
        export_checkpoint(str(llama_checkpoint / "checkpoint"), tmp_path / "out")
    (tmp_path / "out/notes.txt").unlink()
    export_checkpoint(str(llama_checkpoint / "checkpoint"), tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


def test_an_export_that_does_not_fit_on_the_disk_is_refused_with_both_sizes(
    llama_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
    with pytest.raises(CheckpointError, match=r"needs 0.07 GB, and .* has 0.05 GB free"):
        export_checkpoint(str(llama_checkpoint / "checkpoint"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_no_folder(llama_checkpoint, tmp_path, monkeypatch):
    write = export.SafetensorsWriter.write

    def fail(writer, name, tensor):
        if "layers.2" in name:
            raise OSError(28, "No space left on device")
        write(writer, name, tensor)

    monkeypatch.setattr(export.SafetensorsWriter, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(str(llama_checkpoint / "checkpoint"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_source_that_does_not_exist_is_refused(llama_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        export_checkpoint(
            str(llama_checkpoint / "checkpoint"), tmp_path / "out", source=tmp_path / "nowhere"
        )


@pytest.mark.parametrize("size", ["5", "0GB", "5 GB", "-1MB"])
def test_a_size_without_a_unit_is_refused(size, capsys):
    with pytest.raises(SystemExit):
        main(["hf", "export", "a", "b", f"--max-shard-size={size}"])
    assert f"'{size}' is not a size such as 500MB or 5GB" in capsys.readouterr().err


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path):
    net = pipemega.PipelineModule([pipemega.LayerSpec(nn.Linear, 2, 2)], loss_fn=nn.MSELoss())
    checkpoint_of(net, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"type is none: the script built.*") as error:
        export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    assert "`pipemega checkpoint export CHECKPOINT OUT.safetensors` writes" in str(error.value)


@pytest.mark.parametrize(
    ("section", "class_name"),
    [
        (GPT2, "GPT2LMHeadModel"),
        (GPT2 | {"untie_embeddings_and_output_weights": True}, "GPT2LMHeadModel"),
        (LLAMA, "LlamaForCausalLM"),
        (LLAMA | {"untie_embeddings_and_output_weights": False}, "LlamaForCausalLM"),
        (LLAMA | {"add_bias_linear": True}, "LlamaForCausalLM"),
        (LLAMA | {"add_qkv_bias": True}, "Qwen2ForCausalLM"),
        (LLAMA | {"qk_layernorm": True, "max_position_embeddings": 12}, "Qwen3ForCausalLM"),
        (
            GPT2 | {"squared_relu": True, "max_position_embeddings": 12, "pad_vocab_size_to": 77},
            "GPT2LMHeadModel",
        ),
        (MIXTRAL, "MixtralForCausalLM"),
        (MIXTRAL | {"moe_ffn_hidden_size": None, "moe_router_topk": 3}, "MixtralForCausalLM"),
        (QWEN3_MOE, "Qwen3MoeForCausalLM"),
        (
            QWEN3_MOE | {"moe_router_pre_softmax": True, "moe_layer_freq": 2},
            "Qwen3MoeForCausalLM",
        ),
        (
            QWEN3_MOE
            | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_freq": (0, 1)},
            "Qwen3MoeForCausalLM",
        ),
    ],
)
def test_our_gpt_is_exported_with_equal_logits(section, class_name, tmp_path):
    section = section | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    torch.set_default_dtype(torch.float64)
    try:
        config = run_config(model=section)
        net = gpt(GPTConfig.of(pipemega.load_config(config), section["vocab_size"]))
        engine, *_ = pipemega.initialize(net, config)
        generator = torch.Generator().manual_seed(5)
        labels = torch.randint(section["vocab_size"], (1, 8), generator=generator)
        for _ in range(2):
            # The steps change biases and norms, which start at 0 and 1.
            engine.train_batch(iter([(labels, labels)]))
        engine.save_checkpoint(tmp_path / "checkpoint")
        (logits,) = engine.infer([labels])
        engine.close()
    finally:
        torch.set_default_dtype(torch.float32)
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", experts_implementation="eager"
    )
    assert type(model).__name__ == class_name
    assert model.dtype == torch.float64
    assert model.config.max_position_embeddings == section.get("max_position_embeddings", 8)
    inputs = {"input_ids": labels}
    if class_name != "GPT2LMHeadModel":
        # transformers computes the frequencies in fp32 whatever the dtype of the model is.
        exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
        model.model.rotary_emb.inv_freq = section["rotary_base"] ** -exponents
        inputs["position_ids"] = torch.arange(8, dtype=torch.float64).unsqueeze(0)
    with KeepFloat64(), torch.no_grad():
        expected = model(**inputs).logits
    torch.testing.assert_close(logits[..., : section["vocab_size"]], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (GPT2 | {"normalization": "RMSNorm"}, r"GPT2 .* LayerNorm \(model.normalization is 'RMSN"),
        (GPT2 | {"swiglu": True}, r"GPT2 .* no SwiGLU \(model.swiglu is true\)"),
        (GPT2 | {"add_bias_linear": False}, r"GPT2 .* biases in all linear layers"),
        (
            GPT2 | {"num_query_groups": 2},
            r"GPT2 .* every head \(model.num_query_groups is 2, model",
        ),
        (GPT2 | {"num_experts": 4}, r"GPT2 .* no experts \(model.num_experts is 4\)"),
        (GPT2 | {"kv_channels": 8}, r"GPT2 .* \(model.kv_channels is 8\)"),
        (GPT2 | {"qk_layernorm": True}, r"GPT2 .* no norms of queries and keys"),
        (GPT2 | {"embedding_norm": True}, r"GPT2 .* no norm of the token embeddings"),
        (
            LLAMA | {"qk_layernorm": True, "add_qkv_bias": True},
            r"Qwen3 .* no biases \(model.add_qk",
        ),
        (LLAMA | {"qk_layernorm": True, "add_bias_linear": True}, r"Qwen3 .* \(model.add_bias_lin"),
        (LLAMA | {"embedding_norm": True}, r"Llama .* \(model.embedding_norm is true\)"),
        (LLAMA | {"normalization": "LayerNorm"}, r"Llama .* RMSNorm"),
        (LLAMA | {"swiglu": False}, r"Llama .* SwiGLU \(model.swiglu is false\)"),
        (LLAMA | {"rotary_percent": 0.5}, r"Llama .* \(model.rotary_percent is 0.5\)"),
        (MIXTRAL | {"add_bias_linear": True}, r"Mixtral .* no biases \(model.add_bias_linear"),
        (MIXTRAL | {"swiglu": False}, r"Mixtral .* SwiGLU \(model.swiglu is false\)"),
        (
            MIXTRAL | {"moe_router_score_function": "sigmoid"},
            r"Mixtral .* a softmax router \(model.moe_router_score_function is 'sigmoid'\)",
        ),
        (
            MIXTRAL | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
            r"no groups of experts \(model.moe_router_num_groups is 2\)",
        ),
        (
            MIXTRAL | {"moe_router_topk_scaling_factor": 2.5},
            r"no factor of the experts \(model.moe_router_topk_scaling_factor is 2.5\)",
        ),
        (
            MIXTRAL | {"moe_router_pre_softmax": True},
            r"expert weights that sum to 1 \(model.moe_router_pre_softmax is true\)",
        ),
        (
            MIXTRAL | {"moe_layer_freq": (0, 1)},
            r"Mixtral .* experts in all blocks \(model.moe_layer_freq is \[0, 1\]\)",
        ),
        (
            QWEN3_MOE | {"moe_router_enable_expert_bias": True},
            r"Qwen3Moe .* no expert bias \(model.moe_router_enable_expert_bias is true\)",
        ),
        (
            QWEN3_MOE | {"moe_shared_expert_intermediate_size": 8},
            r"Qwen3Moe .* \(model.moe_shared_expert_intermediate_size is 8\)",
        ),
    ],
)
def test_a_gpt_that_transformers_does_not_have_is_refused_with_its_options(
    section, message, tmp_path
):
    config = run_config(model=section)
    net = gpt(GPTConfig.of(pipemega.load_config(config), section["vocab_size"]))
    checkpoint_of(net, tmp_path / "checkpoint", model=section)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")


@pytest.mark.sweep
@pytest.mark.parametrize("name", test_special_models.CONFIGS)
def test_blip2_and_sam_are_exported_with_the_same_tensors(name, tmp_path):
    transformers.utils.logging.disable_progress_bar()
    config = test_special_models.CONFIGS[name]()
    model_class_of(config, None)._from_config(config).save_pretrained(tmp_path / "source")
    checkpoint_of(pipemega.from_pretrained(tmp_path / "source"), tmp_path / "checkpoint")
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
