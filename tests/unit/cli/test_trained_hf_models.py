"""`pipemega evaluate` and `generate` with models of transformers, in one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pipemega
from pipemega.cli import main
from pipemega.data.tokens.tokenizers import load_tokenizer
from pipemega.hf import from_pretrained
from pipemega.hf.hf_module import unsplit_model
from pipemega.hf.text_generation import text_generator
from pipemega.training import generate
from pipemega.training.generation import Sampling
from tests.ranks import hf_folders
from tests.ranks.trained_models import TEXTS, command, train, write_text

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Contains text.jsonl, its token files text.*, and the folders llama, gpt2 and t5."""
    folder = tmp_path_factory.mktemp("models")
    write_text(folder)
    for family in ("llama", "gpt2", "t5"):
        hf_folders.write(family, folder / family, folder)
    return folder


def json_of(*words: object) -> Any:
    code, text = command(*words, "--json")
    assert code == 0
    return json.loads(text)


def generated_by_transformers(path: Path, prompt: str, count: int) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(inputs, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_generates_what_transformers_generates(folder, family):
    prompt = "document 3: w0 w3"
    (result,) = json_of("generate", folder / family, "--prompt", prompt, "--max-tokens", 20)
    assert result["text"] == generated_by_transformers(folder / family, prompt, 20)


def test_a_folder_has_the_loss_that_transformers_computes(folder, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXTS[3]}))
    words = ["--data", tmp_path / "one.jsonl", "--set", "model.seq_length=200"]
    result = json_of("evaluate", folder / "llama", *words)["data"]["one"]
    tokenizer = load_tokenizer(folder / "llama")
    ids = torch.tensor([[*tokenizer.encode(TEXTS[3]), tokenizer.eod]])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    assert result["tokens"] == ids.shape[1] - 1
    assert result["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_caches_of_transformers_give_the_tokens_and_logits_of_whole_sequences(folder, family):
    torch.set_default_dtype(torch.float64)
    try:
        config = {"train_batch_size": 1, "model": {"type": "hf", "path": str(folder / family)}}
        net = from_pretrained(folder / family)
        engine, *_ = pipemega.initialize(net, config)
        layers = {int(p): x for stage in engine.module for p, x in stage.layers.items()}
        model = unsplit_model(net, layers)
        ids = torch.tensor([[5, 9, 260, 4, 261]])
        inputs = (
            {"input_ids": ids, "decoder_input_ids": ids} if family == "t5" else {"input_ids": ids}
        )
        (ours,) = engine.infer([inputs])
        torch.testing.assert_close(model(**inputs).logits, ours, rtol=1e-10, atol=1e-10)
        assert model.get_input_embeddings().weight.dtype == torch.float64
        if family == "t5":
            return
        size = net.hf_config.vocab_size
        sampling = Sampling(temperature=1.0, seed=4)
        cached = text_generator(engine, net, size).generate(ids[0].tolist(), 25, sampling)
        whole = generate(
            engine, ids[0].tolist(), 25, seq_length=64, vocab_size=size, temperature=1.0, seed=4
        )
        assert cached == whole
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_chat_prompt_gets_the_template_and_ends_at_the_end_of_a_turn(folder):
    words = ["generate", folder / "llama", "--max-tokens", 5]
    (chat,) = json_of(*words, "--chat", "--system", "s", "--prompt", "w1")
    (plain,) = json_of(*words, "--prompt", "system: s<|endoftext|>user: w1<|endoftext|>assistant: ")
    assert chat["text"] == plain["text"]
    assert chat["text"] != json_of(*words, "--prompt", "w1")[0]["text"]


def test_records_of_a_chat_are_evaluated_on_their_answers(folder, tmp_path):
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    words = ["--data", tmp_path / "chat.jsonl", "--format", "chat"]
    result = json_of("evaluate", folder / "llama", *words)["data"]["chat"]
    answer = load_tokenizer(folder / "llama").encode("w3 w4")
    assert len(answer) <= result["tokens"] <= len(answer) + 1  # and the end of the turn


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 8.0, "targets": "all-linear"}])
def test_a_checkpoint_is_generated_from_without_the_folder_of_its_model(folder, tmp_path, lora):
    shutil.copytree(folder / "llama", tmp_path / "source")
    data = {"corpus": str(folder / "text.jsonl"), "tokenizer": str(folder / "llama")}
    data |= {"data_path": None, "cache_path": str(tmp_path / "cache")}
    model = {"type": "hf", "path": str(tmp_path / "source"), "seq_length": 32}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    changes = {} if lora is None else {"lora": lora}
    engine = train(tmp_path, model=model, data=data, optimizer=optimizer, **changes)
    shutil.rmtree(tmp_path / "source")
    tokenizer = load_tokenizer(folder / "llama")
    prompt = tokenizer.encode_example("document 3: w0")
    sizes = {"seq_length": 64, "vocab_size": tokenizer.vocab_size, "stop": [tokenizer.eod]}
    tokens = generate(engine, prompt, 10, **sizes)
    words = ["--prompt", "document 3: w0", "--max-tokens", 10]
    (result,) = json_of("generate", tmp_path / "run", *words)
    ended = tokens[-1] == tokenizer.eod
    assert result["text"] == tokenizer.decode(tokens[:-1] if ended else tokens)
    assert result["text"] != json_of("generate", folder / "llama", *words)[0]["text"]


def test_what_cannot_generate_is_refused(folder, tmp_path, capsys):
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=400,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    words = ["--prompt", "w1", "--set", f"data.tokenizer={folder / 'llama'}"]
    assert main(["generate", str(tmp_path / "bert"), *words]) == 2
    assert "BertForMaskedLM does not generate text from text" in capsys.readouterr().err
    long = " ".join(["w1"] * 99)
    assert main(["generate", str(folder / "llama"), "--prompt", long]) == 2
    error = capsys.readouterr().err
    assert "tokens, and the model has 64 positions: shorten the prompt" in error
