"""Adapters in peft's format, compared with peft: read, trained, written, merged."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipemega.checkpoint.save_load import open_path
from pipemega.cli import main
from pipemega.errors import CheckpointError, ConfigError
from pipemega.hf.hf_module import from_pretrained
from pipemega.hf.weights.checkpoint_model import export_adapter, export_checkpoint
from tests.unit.lora.adapted_models import (
    batch,
    engine_of,
    gpt_engine,
    hf_logits,
    hf_model,
    logits_of,
)  # fmt: skip

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@pytest.fixture(autouse=True)
def in_fp64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": r".*self_attn\.[kv]_proj", "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["v_proj", "lm_head"]}),  # the file has lm_head.weight too
    ],
)
def test_an_adapter_of_peft_gives_the_logits_and_gradients_of_peft(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_model(family)
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    wanted = peft.get_peft_model(model, config)
    wanted.save_pretrained(tmp_path / "adapter")
    net = from_pretrained(tmp_path / "base")
    engine = engine_of(net, lora={"path": str(tmp_path / "adapter")})
    torch.testing.assert_close(logits_of(engine), hf_logits(wanted), rtol=0, atol=1e-12)
    before = engine.parameter_state()
    ids, labels = batch()
    engine.train_batch(iter([(ids, labels)]))
    logits = wanted(ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    gradients = {
        name.removeprefix("base_model.model.")
        .replace("modules_to_save.", "")
        .replace(".default", ""): p.grad
        for name, p in wanted.named_parameters()
        if p.requires_grad
    }
    compared = set()
    for name, after in engine.parameter_state().items():
        gradient = gradients.get(net.module_name(name))
        expected = before[name] if gradient is None else before[name] - 0.5 * gradient
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-10)
        if gradient is not None:
            compared.add(net.module_name(name))
    assert compared == set(gradients)


# Rotary angles of transformers are in fp32.
@pytest.mark.parametrize(("style", "tolerance"), [("gpt2", 1e-12), ("llama", 1e-6)])
def test_an_adapter_of_the_gpt_is_read_by_peft_and_merged_on_export(
    style: str, tolerance: float, tmp_path: Path
) -> None:
    """The fused qkv of our GPT is one linear in GPT2, and three in Llama."""
    gpt_engine(style).save_checkpoint(tmp_path / "base")
    export_checkpoint(str(tmp_path / "base"), tmp_path / "base_hf")
    engine = gpt_engine(style, lora={"r": 3, "alpha": 5, "train_also": ["layers.4"]})
    for _ in range(3):
        engine.train_batch(iter([batch()]))
    wanted = logits_of(engine)
    path = engine.save_checkpoint(tmp_path / "tuned")
    export_checkpoint(str(path), tmp_path / "merged")
    load = transformers.AutoModelForCausalLM.from_pretrained
    got = hf_logits(load(tmp_path / "merged", dtype=torch.float64))
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    export_adapter(open_path(str(path)), tmp_path / "adapter")
    base = load(tmp_path / "base_hf", dtype=torch.float64)
    assert (hf_logits(base) - wanted).abs().max() > 0.01
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(hf_logits(adapted), wanted, rtol=0, atol=tolerance)


def test_a_written_adapter_is_read_again_and_merges_into_the_model_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model("llama").save_pretrained(tmp_path / "base")
    engine = engine_of(from_pretrained(tmp_path / "base"), lora={"r": 2, "alpha": 4})
    for _ in range(2):
        engine.train_batch(iter([batch()]))
    wanted = logits_of(engine)
    path = engine.save_checkpoint(tmp_path / "run")
    main(["hf", "export", str(path), str(tmp_path / "adapter"), "--adapter"])
    assert "adapter: adapter for peft, 0.0 MB" in capsys.readouterr().out
    main(["hf", "export", str(path), str(tmp_path / "merged")])
    again = engine_of(from_pretrained(tmp_path / "base"), lora={"path": str(tmp_path / "adapter")})
    assert torch.equal(logits_of(again), wanted)
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = hf_logits(load(tmp_path / "merged", dtype=torch.float64))
    torch.testing.assert_close(merged, wanted, rtol=0, atol=1e-12)
    with pytest.raises(CheckpointError, match="adapter exists and is not empty: name a new folder"):
        export_adapter(open_path(str(path)), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"train_also": ["lm_head"]}),  # its weight is that of embed_tokens too
        ("llama", {"train_also": ["mlp"]}),  # its linears get no adapter
        ("gpt2", {"train_also": ["attn.c_proj"], "targets": ["c_attn"]}),  # stored transposed
    ],
)
def test_layers_that_are_trained_completely_are_read_by_peft_and_again(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"tie_word_embeddings": True} if family == "llama" else {}
    hf_model(family, **changes).save_pretrained(tmp_path / "base")
    engine = engine_of(from_pretrained(tmp_path / "base"), lora={"r": 2, "alpha": 4, **options})
    for _ in range(2):
        engine.train_batch(iter([batch()]))
    wanted, path = logits_of(engine), str(engine.save_checkpoint(tmp_path / "run"))
    export_adapter(open_path(path), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(hf_logits(adapted), wanted, rtol=0, atol=1e-12)
    again = engine_of(from_pretrained(tmp_path / "base"), lora={"path": str(tmp_path / "adapter")})
    assert torch.equal(logits_of(again), wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_that_unties_the_model_is_refused(tmp_path: Path) -> None:
    model = hf_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    message = r"changes model.embed_tokens.weight but not lm_head.weight in the same way, and"
    with pytest.raises(CheckpointError, match=message):
        engine_of(from_pretrained(tmp_path / "base"), lora={"path": str(tmp_path / "adapter")})


def test_a_checkpoint_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    gpt_engine("gpt2").save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has no adapter: its run had no section 'lora'"):
        export_adapter(open_path(str(tmp_path)), tmp_path / "adapter")


def write_adapter(folder: Path, **config: Any) -> str:
    model = hf_model("llama")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(model, options).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "section", "message"),
    [
        ({"use_dora": True}, {}, "adapter_config.json has use_dora: true, which is not supported"),
        ({"bias": "all"}, {}, 'has bias: "all", which is not supported here: merge the adapter'),
        ({"new_option": [1]}, {}, r"has new_option: \[1\], which is not supported"),
        ({"init_lora_weights": "pissa"}, {}, 'has init_lora_weights: "pissa", which changes the'),
        ({"peft_type": "IA3"}, {}, "describes an adapter of the kind IA3: lora.path takes LORA"),
        ({}, {"r": 4}, r"lora.r is 4, and .*adapter_config.json has 2: remove lora.r"),
        ({}, {"alpha": 3}, r"lora.alpha is 3.0, and .* has 8.0"),
        (
            {"r": 4},
            {},
            r"q_proj.lora_A.weight of shape \[2, 16\], and the model of shape \[4, 16\]",
        ),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            {},
            "is the adapter of another model: it lacks model.layers.0.self_attn.v_proj.lora_A",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    options: dict[str, Any], section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hf_model("llama").save_pretrained(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", **options)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        engine_of(from_pretrained(tmp_path / "base"), lora={"path": folder, **section})


def test_missing_and_damaged_files_of_an_adapter_are_named(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "base")
    net = from_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"none has no adapter_config.json; give a folder"):
        engine_of(net, lora={"path": str(tmp_path / "none")})
    folder = Path(write_adapter(tmp_path / "adapter"))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is damaged"):
        engine_of(net, lora={"path": str(folder)})
    os.rename(weights, folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin is not read, because unpickling"):
        engine_of(net, lora={"path": str(folder)})
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config.json is damaged"):
        engine_of(net, lora={"path": str(folder)})
