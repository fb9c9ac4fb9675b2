"""The commands and Python blocks of docs/tutorial.md run in their order.

The sweep starts the commands as they are. The default run shortens the training, and starts no
processes: commands run in this process, and torchrun's ranks are those of the pool.
"""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipemega.config import load
from tests.ranks.pool import RankPool
from tests.ranks.trained_models import command

pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
# `make test` has run these; the tests use that environment.
INSTALLATION = ("make setup", ". .venv/bin/activate")
# The default run takes 1 of 50 steps.
SHORTER = 50
TEXT = ROOT / "docs/optimizer.md"


def steps_of_page() -> Iterator[tuple[str, str]]:
    """Yield ("json" | "python", block) and ("command", line) in the order of the page."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S):
        if language:
            yield language, block
            continue
        for line in block.splitlines():
            line = line.partition(" #")[0].strip()
            if line not in INSTALLATION and re.match(r"(pipemega|python|torchrun|cp) ", line):
                yield "command", line


def follow_page(
    folder: Path,
    run: Callable[[list[str]], str],
    write: Callable[[Path, dict[str, Any]], None],
) -> dict[str, str]:
    """Do what the page says, in the current folder; return the output of each command."""
    outputs: dict[str, str] = {}
    names: dict[str, Any] = {}
    for kind, text in steps_of_page():
        if kind == "json":
            write(folder / "tutorial.json", json.loads(text))
        elif kind == "python":
            exec(compile(text, "docs/tutorial.md", "exec"), names)
        else:
            outputs[text] = run(shlex.split(text))
    return outputs


def output_of(outputs: dict[str, str], start: str) -> list[str]:
    """Return the outputs of the commands that begin with these words."""
    found = [text for line, text in outputs.items() if line.startswith(start)]
    assert found, start
    return found


def check_outputs(folder: Path, outputs: dict[str, str]) -> None:
    (listed,) = output_of(outputs, "pipemega checkpoint ls")
    meshes = re.findall(r"pipeline (\d) x data (\d) x tensor (\d)", listed)
    assert meshes == [("1", "1", "1"), ("2", "1", "1"), ("2", "1", "2")]
    assert listed.count("complete") == 3
    valid, readme = output_of(outputs, "pipemega evaluate")
    (of_ranks,) = output_of(outputs, "torchrun --nproc_per_node=4 -m pipemega evaluate")
    # The seconds differ.
    assert valid.split()[:-1] == of_ranks.split()[:-1]
    assert "README" in readme
    (printed,) = output_of(outputs, "pipemega hf export")
    assert "LlamaForCausalLM" in printed
    assert (folder / "exported/tokenizer.json").is_file()


@pytest.mark.sweep
def test_the_commands_of_the_tutorial_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "README.md", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")

    def run(words: list[str]) -> str:
        if words[0] == "pipemega":
            words = [sys.executable, "-m", *words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(path: Path, config: dict[str, Any]) -> None:
        path.write_text(json.dumps(config))

    outputs = follow_page(tmp_path, run, write)
    check_outputs(tmp_path, outputs)
    (finished,) = output_of(outputs, "torchrun --nproc_per_node=4 pretrain_gpt.py")
    first, last = (float(x) for x in finished.split("validation loss ")[1].split()[:3:2])
    assert last < 0.8 * first


def test_a_shortened_tutorial_runs_in_the_pool(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for number, part in enumerate(TEXT.read_text().split("\n## ")):
        (tmp_path / f"docs/{number}.md").write_text(part)
    shutil.copy(ROOT / "README.md", tmp_path)

    def write(path: Path, config: dict[str, Any]) -> None:
        for section, key in (
            ("training", "train_steps"),
            ("training", "eval_interval"),
            ("checkpoint", "interval"),
        ):
            config[section][key] //= SHORTER
        config["model"] |= {"num_layers": 2, "hidden_size": 16, "seq_length": 16}
        config["scheduler"]["params"]["warmup_steps"] = 1
        config["training"]["progress"] = False
        config["mesh"]["device"] = "cpu"
        path.write_text(json.dumps(config))

    def run(words: list[str]) -> str:
        if words[0] == "cp":
            return str(shutil.copy(*words[1:]))
        if words == ["pipemega", "--version"]:
            with pytest.raises(SystemExit, match="0"):
                command("--version")
            return ""
        if words[0] == "pipemega":
            return in_folder(str(tmp_path), words[1:])
        ranks = int(words[1].partition("=")[2]) if words[0] == "torchrun" else 1
        rest = words[2 if words[0] == "torchrun" else 1 :]
        if rest[:2] == ["-m", "pipemega"]:
            return str(pool.run(ranks, in_folder, str(tmp_path), rest[2:])[0])
        interval = re.compile(r"(training.exit_interval=)(\d+)")
        rest = [interval.sub(lambda m: f"{m[1]}{int(m[2]) // SHORTER}", word) for word in rest]
        rest[0] = str(ROOT / rest[0])
        pool.run(ranks, in_folder, str(tmp_path), rest)
        return ""

    check_outputs(tmp_path, follow_page(tmp_path, run, write))


def in_folder(folder: str, words: list[str]) -> str:
    """Run the script, or a command of pipemega, on this rank with this current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", words)
        if not words[0].endswith(".py"):
            code, text = command(*words)
            assert code == 0
            return text
        runpy.run_path(words[0], run_name="__main__")
        return ""


def test_the_config_of_the_tutorial_is_complete() -> None:
    """The numbers in the text are those of the config."""
    (block,) = (text for kind, text in steps_of_page() if kind == "json")
    config = load(block)
    assert config.batch(1).num_microbatches == 4
    assert "16 samples in 4 micro-batches of 4 samples" in PAGE
