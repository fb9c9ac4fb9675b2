"""What the README and the docs show can be run as it stands."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.config import load
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.simulate import simulate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def test_the_readmes_python_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(block, names)
    assert names["loss"] < 0.7, "half of what guessing one of four has, 1.39"
    assert (tmp_path / "runs/mine/latest").is_file()


def test_the_models_of_the_pipeline_page_are_models(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/pipeline.md", "python")[0], names)
    assert names["net"].count_parameters() == [64000, 64 * 65, 0, 128, 64000]


def test_the_plan_pages_example_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    shown = blocks(ROOT / "docs/plan.md", "")[0]
    command, _, output = shown.partition("\n")
    assert main(command.removeprefix("$ python -m pipemega ").split()) == 0
    assert capsys.readouterr().out == output


def test_the_plan_pages_model_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_model.py").write_text(blocks(ROOT / "docs/plan.md", "python")[0])
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "mesh": {"pipeline": 2}}'
    )
    assert main(["plan", "ds.json", "--model", "my_model:build"]) == 0
    assert "tanh, Linear" in capsys.readouterr().out


def test_the_readmes_config_is_one() -> None:
    (text,) = blocks(ROOT / "README.md", "json")
    assert load(text).batch(1).num_microbatches == 8


def test_the_readmes_table_of_schedules_is_what_the_simulator_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\|[^|]*\| ([\d.]+) % \| ([\d.]+) \|", text, re.M)
    assert [name for name, _, _ in rows] == sorted(SCHEDULES, key=[r[0] for r in rows].index)
    for name, bubble, memory in rows:
        plan = build_plan(name, 4, 8)
        timeline = simulate(plan, CostModel.shared(plan.rank_of_stage, 1, 1, 1, 0))
        assert float(bubble) == pytest.approx(100 * timeline.bubble, abs=0.05), name
        assert float(memory) == max(timeline.peak), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
