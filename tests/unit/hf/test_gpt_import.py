"""The built-in GPT with the weights of a folder: logits of transformers, and refusals."""

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.errors import ConfigError
from pipemega.hf.weights.gpt_import import gpt_from_pretrained, gpt_section
from pipemega.hf_check.split_run import KeepFloat64
from tests.ranks.hf import tiny_models


def save(family, folder, **changes):
    transformers.utils.logging.disable_progress_bar()
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_models.whole_model(tiny_models.config_of(family, **changes))
        model.save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def config_of(section):
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "mesh": {"device": "cpu"},
        "model": section,
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama-tied", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"activation_function": "relu2"}),
        ("mixtral", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ],
)
def test_the_built_in_gpt_has_the_logits_of_transformers(family, changes, tmp_path):
    model = save(family, tmp_path, **changes)
    section = gpt_section(tmp_path)
    ids = torch.arange(5, 13).unsqueeze(0)
    torch.set_default_dtype(torch.float64)
    try:
        config = pipemega.load_config(config_of(section))
        engine, *_ = pipemega.initialize(gpt_from_pretrained(tmp_path, config), config)
        (logits,) = engine.infer([ids])
        engine.close()
        inputs = {"input_ids": ids}
        if family != "gpt2":
            # transformers computes the frequencies in fp32 whatever the dtype of the model is.
            exponents = torch.arange(0, 8, 2) / 8
            model.model.rotary_emb.inv_freq = section["rotary_base"] ** -exponents
            inputs["position_ids"] = torch.arange(8.0).unsqueeze(0)
        with KeepFloat64(), torch.no_grad():
            expected = model.eval()(**inputs).logits
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(logits[..., : tiny_models.VOCAB], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "coefficient"),
    [
        ({"output_router_logits": True}, 2 * 0.3 / 4),
        ({"output_router_logits": True, "mlp_only_layers": [0, 3]}, 2 * 0.3 / 2),
        ({"output_router_logits": False}, None),
    ],
)
def test_the_auxiliary_loss_is_imported_if_transformers_adds_it(changes, coefficient, tmp_path):
    config = tiny_models.config_of("qwen3-moe", router_aux_loss_coef=0.3, **changes)
    config.save_pretrained(tmp_path)
    assert gpt_section(tmp_path).get("moe_aux_loss_coeff") == coefficient


def test_the_auxiliary_loss_of_one_layer_has_the_gradient_of_transformers(tmp_path):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    model = save("mixtral", tmp_path, num_hidden_layers=1, **changes)
    ids = torch.arange(5, 17).view(2, 6)
    section = gpt_section(tmp_path, seq_length=6)
    options = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    torch.set_default_dtype(torch.float64)
    try:
        config = pipemega.load_config(config_of(section) | options)
        engine, *_ = pipemega.initialize(gpt_from_pretrained(tmp_path, config), config)
        before = engine.parameter_state()["layers.2.mlp.router.weight"].clone()
        engine.train_batch(iter([(ids, ids)]))
        found = before - engine.parameter_state()["layers.2.mlp.router.weight"]
        engine.close()
        output = model(input_ids=ids)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())
        gate = model.model.layers[0].mlp.gate.weight
        (plain,) = torch.autograd.grad(loss, gate, retain_graph=True)
        (loss + 0.3 * output.aux_loss).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, gate.grad, rtol=0, atol=1e-6)
    assert (plain - gate.grad).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {}, r"activation_function is 'gelu_new'"),
        ("mistral", {}, r"sliding_window \(4\)"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, r"biases in attention or in the MLP"),
        ("qwen3", {"attention_bias": True}, r"biases in attention or in the MLP"),
        ("mixtral", {"sliding_window": 4}, r"sliding_window \(4\)"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise is 0.1, and our routers"),
        ("qwen3-moe", {"attention_bias": True}, r"biases in attention or in the MLP"),
        ("bloom", {}, r"its family is 'bloom', and only llama, .*, qwen3_moe and gpt2 fit"),
        ("deepseek-v3", {}, r"its family is 'deepseek_v3', and only llama"),
    ],
)
def test_a_folder_of_another_model_is_refused_with_the_option(family, changes, message, tmp_path):
    tiny_models.config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        gpt_section(tmp_path)


def test_more_tokens_than_learned_positions_are_refused(tmp_path):
    config = tiny_models.config_of("gpt2", activation_function="gelu")
    config.save_pretrained(tmp_path)
    length = config.n_positions
    expected = rf"it has {length} learned positions, and seq_length is {length + 1}"
    with pytest.raises(ConfigError, match=expected):
        gpt_section(tmp_path, seq_length=length + 1)


def test_shorter_samples_keep_all_positions(tmp_path):
    model = save("gpt2", tmp_path, activation_function="gelu")
    section = gpt_section(tmp_path, seq_length=8)
    assert section["max_position_embeddings"] == model.config.n_positions > 8
    config = pipemega.load_config(config_of(section))
    engine, *_ = pipemega.initialize(gpt_from_pretrained(tmp_path, config), config)
    found = engine.parameter_state()["layers.1.weight"]
    engine.close()
    torch.testing.assert_close(found, model.transformer.wpe.weight.float())
