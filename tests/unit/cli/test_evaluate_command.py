"""`python -m pipemega evaluate`, in one process."""

import json
import math
from pathlib import Path

import pytest

from pipemega.cli import main
from pipemega.data.tokens.token_files import IndexedDataset
from tests.ranks.trained_models import TEXTS, command, log_probabilities, train, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Contains text.jsonl, its token files text.*, and run/ with checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    train(folder)
    return folder


def evaluated(*words: object) -> dict:
    code, text = command("evaluate", *words, "--json")
    assert code == 0
    return json.loads(text)


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["evaluate", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_the_loss_is_the_mean_over_all_tokens_of_a_text(folder, tmp_path):
    """Also of the last sample, which is shorter than model.seq_length."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXTS[3]}))
    found = evaluated(folder / "run", "--data", tmp_path / "one.jsonl")
    assert found["step"] == 2
    assert found["path"] == str(folder / "run/global_step2")
    files = IndexedDataset(folder / "text")
    tokens = files.get(3).tolist()
    assert len(tokens) % 24 > 1
    engine = train(folder, training={"resume": "auto"})
    expected = []
    for start in range(0, len(tokens) - 1, 24):
        expected += log_probabilities(engine, tokens[start : start + 25]).tolist()
    result = found["data"]["one"]
    assert result["tokens"] == len(tokens) - 1 == len(expected)
    assert result["loss"] == pytest.approx(-sum(expected) / len(expected), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["samples"] == math.ceil((len(tokens) - 1) / 24)


def test_a_text_shorter_than_a_sample_is_evaluated(folder, tmp_path):
    (tmp_path / "short.txt").write_text("w1 w2")
    result = evaluated(folder / "run", "--data", tmp_path / "short.txt")["data"]["short"]
    assert 2 <= result["tokens"] < 24
    assert result["samples"] == 1


def test_several_data_sets_get_a_line_each(folder):
    words = ["--data", folder / "text.jsonl", "--data", f"files={folder / 'text'}"]
    code, text = command("evaluate", folder / "run", *words)
    assert code == 0
    path, head, *rows = text.splitlines()
    assert path == f"{folder}/run/global_step2, step 2"
    assert head.split() == ["data", "loss", "perplexity", "tokens", "samples", "seconds"]
    assert [row.split()[0] for row in rows] == ["text", "files"]
    # Both read the same documents in the same order.
    assert rows[0].split()[1:5] == rows[1].split()[1:5]


def test_without_data_the_validation_set_of_the_run_is_evaluated(folder):
    own = evaluated(folder / "run")["data"]["valid"]
    files = IndexedDataset(folder / "text")
    # data.split gives it the last 30 % of 12 documents.
    assert own["tokens"] == int(files.lengths[8:].sum()) - 1
    train_set = evaluated(folder / "run", "--split", "train")["data"]["train"]
    assert train_set["tokens"] == int(files.lengths[:8].sum()) - 1


def test_the_number_of_samples_can_be_limited(folder):
    result = evaluated(folder / "run", "--samples", 3, "--split", "train")["data"]["train"]
    assert result["samples"] == 3
    assert result["tokens"] == 3 * 24
    whole = evaluated(folder / "run", "--samples", 99)["data"]["valid"]
    assert whole["tokens"] == evaluated(folder / "run")["data"]["valid"]["tokens"]


def test_keys_of_the_config_can_be_changed(folder):
    fp32, bf16 = (
        evaluated(folder / "run", "--set", f"bf16.enabled={flag}")["data"]["valid"]["loss"]
        for flag in ("false", "true")
    )
    assert 0 < abs(fp32 - bf16) < 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}/none"], "no checkpoint folder '{folder}/none': is the path right?"),
        (["{folder}/run", "--tag", "best"], "checkpoint {folder}/run/best is missing"),
        (
            ["{folder}/run", "--data", "{folder}/none.txt"],
            "--data {folder}/none.txt: data.corpus: no file, folder or glob matches the corpus",
        ),
        (
            ["{folder}/run", "--data", "{folder}/text", "--data", "{folder}/text.jsonl"],
            "--data: two data sets have the name 'text': write --data NAME={folder}/text.jsonl",
        ),
        (
            ["{folder}/run", "--data", "no_such_module:data"],
            "--data no_such_module:data: No module named 'no_such_module'",
        ),
        (["{folder}/run", "--data", "os:path"], "--data os:path is no dataset but module: it has"),
        (
            ["{folder}/run", "--set", "data.tokenizer=none.json"],
            "the tokenizer none.json does not exist",
        ),
        (
            ["{folder}/run", "--set", "data.split=1,0"],
            "the data of the run has no valid set (data.split, data.valid_data_path): name files",
        ),
        (["{folder}/run", "--set", "mesh.pipeline=2"], "1 rank was started, and one copy"),
        (["{folder}/run", "--set", "model.hidden_size=24"], "has another model"),
    ],
)
def test_wrong_arguments_are_one_clear_message(folder, capsys, words, message):
    found = error_of(capsys, *(word.format(folder=folder) for word in words))
    assert message.format(folder=folder) in found


def test_a_missing_tokenizer_is_reported(folder, tmp_path, capsys):
    """The run has token files without a tokenizer beside them."""
    for ending in ("bin", "idx"):
        (tmp_path / f"bare.{ending}").write_bytes((folder / f"text.{ending}").read_bytes())
    bare = f"data.data_path={tmp_path / 'bare'}"
    # Token files need no tokenizer: the vocabulary is that of the weights.
    assert evaluated(folder / "run", "--set", bare)["data"]["valid"]["tokens"] > 0
    found = error_of(capsys, folder / "run", "--set", bare, "--data", folder / "text.jsonl")
    assert "the tokenizer of the model is not known" in found
    assert "give --set data.tokenizer=PATH" in found
