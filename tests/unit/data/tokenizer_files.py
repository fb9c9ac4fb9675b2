"""Small tokenizers of each format, for tests."""

import io
import json
from pathlib import Path

import pytest

from pipemega.data.tokens.tokenizers import FastTokenizer

TEXTS = ["to be or not to be, that is the question: über alles. " * 3] * 40


def bpe_files(folder: Path, **config: object) -> Path:
    """Write tokenizer.json, vocab.json, merges.txt and, with `config`, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = FastTokenizer.train(TEXTS, 300).to_json()
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    model = json.loads(content)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def sentencepiece_model(folder: Path) -> Path:
    """Write a .model of SentencePiece."""
    spm = pytest.importorskip("sentencepiece", reason="SentencePiece is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=content, vocab_size=60, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    path = folder / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path
