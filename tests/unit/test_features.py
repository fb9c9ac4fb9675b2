"""Each row of docs/features.md has a command, and the command works."""

import json
import re
import shlex
from pathlib import Path

import pytest

from docs import features
from pipemega.cli import main
from pipemega.config import load

ROOT = Path(__file__).parents[2]
ROWS = list(features.rows())
# Rows of each document.
SIZES = [15, 8, 21, 7, 12]


def words_of(row: tuple[str, str, str, str]) -> list[str]:
    return shlex.split(row[3])


def rows_with(program: str, *commands: str) -> list[list[str]]:
    """Return the different commands of this program, of these subcommands or of all."""
    found = [words_of(row) for row in ROWS if words_of(row)[0] == program]
    found = [words for words in found if not commands or words[1] in commands]
    return [shlex.split(line) for line in sorted({shlex.join(words) for words in found})]


def test_the_page_is_what_the_command_prints() -> None:
    """Write it with `python -m docs.features > docs/features.md`."""
    assert (ROOT / "docs/features.md").read_text(encoding="utf-8") == features.page()


def test_no_row_is_missing() -> None:
    assert [number for number, *_ in ROWS] == [
        f"{section}.{row}" for section, size in enumerate(SIZES) for row in range(1, size + 1)
    ]
    assert all(promise and way and command for _, promise, way, command in ROWS)


def test_the_tests_that_rows_name_exist() -> None:
    for words in rows_with("pytest"):
        named = [word for word in words[1:] if word.startswith("tests/")]
        assert named == words[-len(named) :], words
        for word in named:
            path, _, name = word.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, word
            assert "def test_" in text, word


def test_the_scripts_and_configs_that_rows_name_exist() -> None:
    for words in rows_with("torchrun"):
        ranks = int(words[1].removeprefix("--nproc_per_node="))
        assert ranks in (2, 4)
        if words[2] != "-m":
            assert (ROOT / words[2]).is_file(), words
        for config in (word for word in words if word.startswith("configs/")):
            load(ROOT / config)


def test_no_row_has_another_program() -> None:
    assert {words_of(row)[0] for row in ROWS} == {"pipemega", "pytest", "torchrun"}


def run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file that a command writes is not written to the checkout.
    words = [str(folder / word) if word.endswith(".html") else word for word in words]
    monkeypatch.chdir(ROOT)
    assert main(words[1:]) == 0, words


@pytest.mark.parametrize("words", rows_with("pipemega", "schedule", "check"), ids=" ".join)
def test_the_commands_of_rows_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(words, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("words", rows_with("pipemega", "plan"), ids=" ".join)
def test_the_plans_of_rows_are_computed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(words, tmp_path, monkeypatch)


def test_a_failed_command_is_shown_with_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"it works": "pipemega --version", "it fails": "pipemega check none.json"}
    rows = [[promise, "so", command] for promise, command in commands.items()]
    content = {"head": [], "documents": [{"document": "one", "rows": rows}]}
    (tmp_path / "rows.json").write_text(json.dumps(content))
    monkeypatch.setattr(features, "ROWS", tmp_path / "rows.json")
    assert features.run([]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^ok     0\.1  it works$", printed, re.M)
    assert re.search(r"^failed 0\.2  it fails\n\$ pipemega check none.json\n.*none", printed, re.M)
