"""`python -m pipemega generate`, in one process."""

import json
from pathlib import Path

import pytest
import torch

from pipemega.cli import main
from pipemega.data.tokens.tokenizers import load_tokenizer
from pipemega.training import generate
from tests.ranks.trained_models import command, train, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Contains text.jsonl, its token files text.*, and run/ with checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    train(folder)
    return folder


def generated(*words: object) -> list[dict]:
    code, text = command("generate", *words, "--json")
    assert code == 0
    return json.loads(text)


def test_the_text_is_that_of_generate(folder):
    tokenizer = load_tokenizer(folder / "text.tokenizer.json")
    prompt = tokenizer.encode("document 1: w0")
    engine = train(folder, training={"resume": "auto"})
    sizes = {"seq_length": 24, "vocab_size": tokenizer.vocab_size, "temperature": 0.9, "seed": 3}
    # Longer than model.seq_length.
    tokens = generate(engine, prompt, 30, use_cache=False, stop=[tokenizer.eod], **sizes)
    words = ["--prompt", "document 1: w0", "--max-tokens", 30, "--temperature", 0.9, "--seed", 3]
    (result,) = generated(folder / "run", *words)
    assert result["tokens"] == len(tokens) > 5
    ended = tokens[-1] == tokenizer.eod
    assert result["finish_reason"] == ("stop" if ended else "length")
    assert result["text"] == tokenizer.decode(tokens[:-1] if ended else tokens)


def test_the_text_ends_at_a_stop_token(folder):
    words = [folder / "run", "--prompt", "w1", "--temperature", 1, "--max-tokens", 20]
    (whole,) = generated(*words)
    tokenizer = load_tokenizer(folder / "text.tokenizer.json")
    texts = [tokenizer.decode([number]) for number in tokenizer.encode(whole["text"])]
    stop = next(text for text in texts[3:] if text.isascii())
    (part,) = generated(*words, "--stop", stop)
    assert part["finish_reason"] == "stop"
    assert whole["text"].startswith(part["text"])
    assert stop not in part["text"]
    assert part["tokens"] < whole["tokens"]


def test_several_prompts_get_a_text_each(folder):
    words = ["--prompt", "w1 w2", "--prompt", "", "--max-tokens", 4]
    first, empty = generated(folder / "run", *words)
    assert (first["prompt"], empty["prompt"]) == ("w1 w2", "")
    code, text = command("generate", folder / "run", *words)
    assert code == 0
    assert text == f"> w1 w2\n{first['text']}\n\n> \n{empty['text']}\n"
    code, text = command("generate", folder / "run", *words[:2], "--max-tokens", 4)
    assert text == f"{first['text']}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature is -1: use 0 for the most likely token"),
        (["--seed", str(1 << 70)], "seed is 1180591620717411303424: use a number between"),
        (["--prompt", "\udcff"], "--prompt '\\udcff' is not UTF-8 text"),
        (["--top-p", "2"], "top_p is 2: use a number above 0, up to 1"),
        (
            ["--stop", "<|end|>"],
            "--stop '<|end|>' is 6 tokens of {folder}/text.tokenizer.json, and must be one",
        ),
        (
            ["--set", "data.tokenizer=none"],
            "the tokenizer none does not exist; give --set data.tokenizer=PATH",
        ),
        (["--chat"], "the tokenizer {folder}/text.tokenizer.json has no chat template"),
        (["--system", "Be brief."], "--system is for --chat"),
    ],
)
def test_wrong_arguments_are_one_clear_message(folder, capsys, words, message):
    assert main(["generate", str(folder / "run"), "--prompt", "w1", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(folder=folder) in line


def test_a_very_small_temperature_takes_the_most_likely_token(folder):
    words = (folder / "run", "--prompt", "w1", "--max-tokens", 4)
    assert generated(*words, "--temperature", 1e-40)[0]["text"] == generated(*words)[0]["text"]


def test_a_model_without_tokens_generates_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "squares.py").write_text(
        "import pipemega, pydantic\n"
        "from torch import nn\n"
        '@pipemega.register_model("squares")\n'
        "class Squares(pydantic.BaseModel):\n"
        "    def build(self, context):\n"
        "        return pipemega.PipelineModule(\n"
        "            [pipemega.LayerSpec(nn.Linear, 2, 3)], loss_fn=nn.functional.cross_entropy)\n"
        "def labelled():\n"
        "    import torch\n"
        "    return [(torch.ones(2) * i, i % 3) for i in range(7)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import pipemega

    config = pipemega.load_config(
        {"train_batch_size": 2, "imports": ["squares"], "model": {"type": "squares"}}
    )
    engine, *_ = pipemega.initialize(
        pipemega.build_model(config, pipemega.build_mesh(config)), config
    )
    engine.save_checkpoint("run")
    assert main(["generate", "run", "--prompt", "w1"]) == 2
    assert "the tokenizer of the model is not known" in capsys.readouterr().err
    # It is evaluated on a dataset of the user; its labels are classes.
    code, text = command("evaluate", "run", "--data", "squares:labelled", "--json")
    assert code == 0
    result = json.loads(text)["data"]["squares:labelled"]
    assert (result["samples"], result["tokens"], result["perplexity"]) == (7, 0, None)
    x = torch.arange(7.0)[:, None].expand(7, 2)
    logits = torch.cat(engine.infer([x]))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(7) % 3)
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert main(["evaluate", "run"]) == 2
    assert "the samples of model.type 'squares' are not token ids alone" in capsys.readouterr().err
