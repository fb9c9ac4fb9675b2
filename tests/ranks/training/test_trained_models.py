"""`pipemega evaluate` and `generate` give the same results on every mesh."""

import json
from pathlib import Path

import pytest

from tests.ranks import hf_folders
from tests.ranks.pool import RankPool
from tests.ranks.trained_models import command, train, write_text
from tests.sampling import some

MESHES = [
    {"pipeline": 2, "tensor": 2},
    pytest.param({"pipeline": 2}, marks=pytest.mark.sweep),
    pytest.param({"tensor": 2}, marks=pytest.mark.sweep),
    pytest.param({"pipeline": 3}, marks=pytest.mark.sweep),
    pytest.param({"data": 4}, marks=pytest.mark.sweep),
    pytest.param({"pipeline": 2, "tensor": 2, "sequence_parallel": True}, marks=pytest.mark.sweep),
]
MODELS = some(["gpt", "llama", "t5"], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_text(folder)
    return folder


def path_of(model: str, folder: Path) -> Path:
    """Return a checkpoint, or a folder of transformers."""
    if model != "gpt":
        pytest.importorskip("transformers")
    path = folder / ("run" if model == "gpt" else model)
    if not path.exists():
        train(folder) if model == "gpt" else hf_folders.write(model, path, folder)
    return path


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_evaluates_and_generates_as_one_process(pool: RankPool, folder, model, mesh):
    path = path_of(model, folder)
    sets = [
        word for key, size in mesh.items() for word in ("--set", f"mesh.{key}={json.dumps(size)}")
    ]
    commands = [["generate", path, "--prompt", "document 1: w", "--max-tokens", 40]]
    commands[0] += ["--temperature", 0.8, "--top-p", 0.9]
    if model != "t5":
        commands.append(["evaluate", path, "--data", folder / "text.jsonl", "--samples", 9])
    ranks = mesh.get("pipeline", 1) * mesh.get("tensor", 1) * mesh.get("data", 1)
    for words in commands:
        code, text = command(*words, "--json")
        assert code == 0
        (first, printed), *others = pool.run(ranks, command, *words, "--json", *sets)
        assert (first, others) == (0, [(0, "")] * (ranks - 1)), "only rank 0 prints"
        one, several = json.loads(text), json.loads(printed)
        if words[0] == "generate":
            assert several[0]["text"] == one[0]["text"] != ""
        else:
            for key in ("loss", "perplexity", "tokens", "samples"):
                expected = one["data"]["text"][key]
                assert several["data"]["text"][key] == pytest.approx(expected, rel=1e-5)


def test_an_error_of_a_command_is_the_same_on_every_rank(pool: RankPool, folder, tmp_path):
    path = path_of("gpt", folder)
    codes = pool.run(2, failing, "evaluate", path, "--data", tmp_path / "none.txt")
    assert codes == [1, 1]
    assert pool.run(2, failing, "generate", path, "--prompt", "w", "--stop", "no") == [1, 1]


def failing(*words: object) -> object:
    try:
        return command(*words)
    except SystemExit as end:
        return end.code
