"""docs/coming_from.md: from a launch script and token files to a training on two ranks."""

import json
import re
from pathlib import Path

import pytest

from pipemega.cli import main
from tests.ranks.compat import megatron_move
from tests.ranks.pool import RankPool

PAGE = Path(__file__).parents[3] / "docs/coming_from.md"


def block(language: str) -> str:
    section = PAGE.read_text().split("\n## From Megatron-LM\n")[1]
    (found, *_) = re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)
    return str(found)


def test_the_move_of_the_page_trains_on_two_ranks_as_on_one(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUS_PER_NODE", raising=False)
    megatron_move.make_data(tmp_path / "data")
    (tmp_path / "pretrain.sh").write_text(block("sh"))
    words = ["pretrain.sh", "runs/small", "data/wiki_text_document"]
    assert main(["config", "from-megatron", *words]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(block("json"))
    assert printed.err == block("text")
    (tmp_path / "config.json").write_text(printed.out)
    assert main(["check", "config.json", "--world", "2"]) == 0
    (alone,) = pool.run(1, megatron_move.train, str(tmp_path), 1)
    first, second = pool.run(2, megatron_move.train, str(tmp_path), 2)
    assert first == second == pytest.approx(alone, rel=1e-5)
    assert first[-1] < first[0]
