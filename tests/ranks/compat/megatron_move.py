"""The steps of pretrain_gpt.py with the config of docs/coming_from.md."""

import json
from pathlib import Path

import pytest

import pipemega
from pipemega.data.tokens.token_files import IndexedWriter
from pipemega.data.tokens.tokenizers import FastTokenizer
from pipemega.training.pretrain import load_datasets

TEXT = Path(__file__).parents[3] / "LICENSE"


def make_data(folder: Path) -> None:
    """Write GPT-2's two tokenizer files and token files, as a user of Megatron has them."""
    folder.mkdir()
    documents = TEXT.read_text().split("\n\n")
    tokenizer = FastTokenizer.train(documents, 300)
    model = json.loads(tokenizer.to_json())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    with IndexedWriter(folder / "wiki_text_document", "uint16") as writer:
        for document in documents:
            writer.add_document([*tokenizer.encode(document), tokenizer.eod])


def train(folder: str, pipeline: int) -> list[float]:
    """Return the losses of the three steps of config.json on `pipeline` ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        overrides = ["mesh.device=cpu", "data.num_workers=0", f"mesh.pipeline={pipeline}"]
        overrides += [f"checkpoint.save=runs/on_{pipeline}"]
        config = pipemega.load_config("config.json", overrides)
        mesh = pipemega.build_mesh(config)
        data = load_datasets(config, mesh)
        assert data.train is not None
        net = pipemega.build_model(config, mesh, data.vocab_size)
        engine, *_ = pipemega.initialize(net, config, data.train, mesh=mesh)
        return [float(engine.train_batch()) for _ in range(3)]
