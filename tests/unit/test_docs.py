"""Snippets, commands, tables and links in README and docs are correct."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega.checkpoint.deepspeed.weights_loading import ImportOptions, import_deepspeed
from pipemega.cli import COMMANDS, main
from pipemega.config import load
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.planning.estimate import Request, estimate
from tests.paper.test_imports import LAYERS
from tests.sampling import some
from tests.unit.checkpoint.deepspeed_files import write_pipeline

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
]
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT).with_suffix(""))
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.M | re.S)
    return [body for name, body in found if name == language]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the command lines in code blocks, fenced or indented, as lists of words."""
    indented = "\n".join(re.findall(r"^    (.+)$", text_of(page), re.M))
    for body in [*blocks(page, ""), *blocks(page, "bash"), indented]:
        for line in body.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").replace("python -m pipemega ", "pipemega ")
            if re.match(r"(\S*/)?(pipemega|torchrun|pytest|make|pip|python|srun) ", line):
                yield shlex.split(line, comments=True)


def inline_commands(page: Path) -> list[list[str]]:
    """Return the command lines in the running text as lists of words; some have placeholders."""
    found = re.findall(r"`((?:python -m )?(?:pipemega|make|pip) [^`]+)`", text_of(page))
    return [shlex.split(line.removeprefix("python -m "), comments=True) for line in found]


# Context of the python blocks of a page: what a reader has before the first of them.


def context_of_checkpoints(folder: Path) -> dict[str, Any]:
    net = pipemega.PipelineModule(
        [pipemega.LayerSpec(nn.Linear, 6, 8), pipemega.LayerSpec(nn.Linear, 8, 4)],
        loss_fn=nn.functional.cross_entropy,
    )
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    dataset = [(torch.ones(6), 1)] * 8
    engine, *_ = pipemega.initialize(net, config, training_data=dataset)
    for _ in range(100):
        engine.train_batch()
    shapes = [((8, 6), (8,)), ((4, 8), (4,))]
    layers = {
        p: {"weight": torch.ones(w), "bias": torch.ones(b)} for p, (w, b) in enumerate(shapes)
    }
    write_pipeline(folder / "ds_run", layers)
    import_deepspeed(str(folder / "ds_run"), str(folder / "imported"), ImportOptions())
    return {"engine": engine}


def context_of_pipeline(folder: Path) -> dict[str, Any]:
    (folder / "ds.json").write_text('{"train_batch_size": 2, "optimizer": {"type": "AdamW"}}')
    tokens = torch.arange(20).view(2, 10)
    return {
        "pipemega": pipemega,
        "tokens": tokens,
        "dataset": [(row, row) for row in tokens] * 4,
        "iterator": iter([(tokens, tokens)] * 4),
    }


def context_of_tensor_parallel(folder: Path) -> dict[str, Any]:
    mesh = pipemega.build_mesh(load({"train_batch_size": 1}))
    return {"mesh": mesh, "nn": nn, "torch": torch, "hidden": 8, "q_size": 8, "kv_size": 4}


def context_of_huggingface_weights(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need it")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    net = pipemega.from_pretrained(config, pretrained=False)
    engine, *_ = pipemega.initialize(net, {"train_batch_size": 1})
    engine.save_checkpoint("runs/mine")
    assert main(["hf", "export", "runs/mine", "exported"]) == 0
    return {}


CONTEXTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "checkpoints": context_of_checkpoints,
    "huggingface": context_of_huggingface_weights,
    "pipeline": context_of_pipeline,
    "models": context_of_tensor_parallel,
}


@pytest.mark.parametrize(
    "page",
    # The blocks of the tutorial need its commands: tests/ranks/training/test_tutorial.py.
    [page for page in PAGES if blocks(page, "python") and page.stem != "tutorial"],
    ids=lambda page: page.stem,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_python_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    names |= CONTEXTS.get(page.stem, lambda folder: {})(tmp_path)
    try:
        for number, block in enumerate(blocks(page, "python"), start=1):
            exec(compile(block, f"{page.name}, python block {number}", "exec"), names)
    finally:
        # DeepSpeed's calls connect this process with itself.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if page == README:
        assert names["trainer"].evaluations[-1].values["top1"] > 0.7, "guessing gives 0.25"
        assert (tmp_path / "runs/mine/latest").is_file()
        assert list(tmp_path.glob("runs/mine/wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "json")], ids=lambda page: page.stem
)
def test_the_json_blocks_of_a_page_are_configs(page: Path) -> None:
    for block in blocks(page, "json"):
        text = block if block.lstrip().startswith("{") else f"{{{block}}}"
        default = "" if "train_batch_size" in text else '"train_batch_size": 16, '
        load("{" + default + text.strip().removeprefix("{"))


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pipemega")
    import_module(f"pipemega.cli.{command}").add_parser(parser.add_subparsers(required=True))
    return parser


def check_command(words: list[str]) -> None:
    """Raises or fails if a command line of a block cannot work."""
    program, *rest = words
    if program == "pipemega" and rest != ["--version"]:
        assert rest[0] in COMMANDS, rest
        try:
            parser_of(rest[0]).parse_args([w for w in rest if w != "|"][: _end(rest)])
        except SystemExit as error:
            pytest.fail(f"the command line does not accept {words}: {error}")
    overrides = [rest[i + 1] for i, word in enumerate(rest) if word == "--set"]
    configs = [word for word in rest if word.startswith("configs/")]
    for config in configs:
        load(ROOT / config, overrides if program == "torchrun" else [])
    for word in rest:
        if re.match(r"(tests|configs|benchmarks)/[\w/.]+$", word):
            assert (ROOT / word).exists() or (ROOT / word).parent.is_dir(), word
        if re.match(r"\w+\.py$", word):
            assert (ROOT / word).is_file(), word
        if word.startswith("benchmarks.") or word.startswith("docs."):
            assert (ROOT / f"{word.replace('.', '/')}.py").is_file(), word
    if program == "make":
        check_make(rest)
    if program == "pip":
        check_extras(rest)


def _end(words: list[str]) -> int:
    """The number of words before a redirection."""
    return next((i for i, word in enumerate(words) if word in (">", "|", "2>")), len(words))


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    for target in targets:
        assert re.search(rf"^{target}:", text_of(ROOT / "Makefile"), re.M), target


def check_extras(words: list[str]) -> None:
    setup = text_of(ROOT / "setup.py")
    for word in words:
        for extra in re.findall(r"^\.\[(.*)\]$", word):
            assert all(f'"{name}": [' in setup for name in extra.split(",")), word
        assert not word.startswith("pipemega"), "pipemega is not on a package index"


@every_page
def test_the_commands_in_the_blocks_of_a_page_are_accepted(page: Path) -> None:
    for words in commands(page):
        check_command(words)


@every_page
def test_the_commands_in_the_text_of_a_page_exist_with_their_options(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, *rest in inline_commands(page):
        if program == "make":
            check_make(rest)
        elif program == "pip":
            check_extras(rest)
        elif not rest[0].startswith(("-", "COMMAND")):
            assert rest[0] in COMMANDS, rest
            # A subcommand has a help of its own; NAME and `ls|verify` are not subcommands.
            for help_words in ([*rest[:2], "--help"], [rest[0], "--help"]):
                with pytest.raises(SystemExit) as end:
                    parser_of(rest[0]).parse_args(help_words)
                if end.value.code == 0:
                    break
            options = {word.partition("=")[0] for word in rest if word.startswith("--")}
            printed = capsys.readouterr().out
            assert [option for option in options if option not in printed] == [], rest


def test_the_model_of_the_pipeline_page_has_tied_parameters() -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/pipeline.md", "python")[0], names)
    assert names["net"].count_parameters() == [64000, 64 * 65, 0, 128, 64000]


@pytest.mark.sweep
def test_the_example_of_the_plan_page_is_the_output_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    shown = blocks(ROOT / "docs/plan.md", "")[0]
    command, _, output = shown.partition("\n")
    words = command.removeprefix("$ ").removeprefix("python -m ").split()
    assert main(words[1:]) == 0
    assert capsys.readouterr().out == output


def test_the_model_of_the_plan_page_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_model.py").write_text(blocks(ROOT / "docs/plan.md", "python")[0])
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "mesh": {"pipeline": 2}}'
    )
    assert main(["plan", "ds.json", "--model", "my_model:build"]) == 0
    assert "Linear, tanh" in capsys.readouterr().out


def test_the_config_of_the_readme_has_8_micro_batches() -> None:
    (text,) = blocks(README, "json")
    assert load(text).batch(1).num_microbatches == 8


def test_the_readmes_table_of_schedules_has_the_simulated_numbers() -> None:
    pattern = r"^\| `([\w-]+)`[^|]*\|[^|]*\| ([\d.]+) % \| ([\d.]+) \|"
    rows = re.findall(pattern, text_of(README), re.M)
    assert {name for name, *_ in rows} == {*SCHEDULES}
    for name, bubble, memory in rows:
        plan = build_plan(name, 4, 8)
        timeline = simulate(plan, CostModel.from_rank_costs(plan.rank_of_stage, 1, 1, 1, 0))
        assert float(bubble) == pytest.approx(100 * timeline.bubble, abs=0.05), name
        assert float(memory) == max(timeline.peak), name


@pytest.mark.sweep
def test_the_table_of_memory_has_the_planned_numbers() -> None:
    pattern = r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(pattern, text_of(ROOT / "docs/schedules.md"), re.M)
    for column, recompute in ((1, "none"), (2, "full")):
        peaks = peaks_of_1_3b_gpt(recompute)
        assert {row[0]: row[column] for row in rows} == peaks, recompute


def peaks_of_1_3b_gpt(recompute: str) -> dict[str, str]:
    """Return the GB of the fullest rank by schedule, as the command of that page prints them."""
    changes = ["train_batch_size=16", f"model.recompute={recompute}"]
    config = load(ROOT / "configs/gpt_1.3b_tp2_pp4.json", changes)
    report = estimate(Request(config, compare=tuple(SCHEDULES)))
    return {one.plan.name: f"{one.peak / 1e9:.2f}" for one in report.compared}


@pytest.mark.parametrize("recompute", some(["none", "full"], 0))
def test_the_table_of_weight_queue_limits_has_the_planned_numbers(recompute: str) -> None:
    page = text_of(ROOT / "docs/pipeline.md")
    pattern = rf"^\| {recompute} \|[^|]*\|[^|]*\| (\w+)[^|]* \| ([\d.]+) GB \| ([\d.]+) \|"
    rows = re.findall(pattern, page, re.M)
    assert len(rows) == 3
    for limit, peak, step in rows:
        changes = ["train_batch_size=16", f"model.recompute={recompute}"]
        changes += ["pipeline.schedule=zb-h1"]
        changes += [f"pipeline.weight_queue_limit={limit}"]
        found = estimate(Request(load(ROOT / "configs/gpt_1.3b_tp2_pp4.json", changes))).prediction
        assert f"{found.peak / 1e9:.2f}" == peak
        assert f"{found.timeline.makespan:.1f}" == step


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@every_page
def test_the_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", text_of(page))
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_the_layers_of_the_architecture_page_are_those_of_the_import_test() -> None:
    page = text_of(ROOT / "docs/architecture.md")
    table = page.split("| layer, from low to high |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w/]+)` \|", table, re.M) == LAYERS


@every_page
def test_the_modules_and_files_that_a_page_names_exist(page: Path) -> None:
    """Names like `pipeline/plan/lowering.py` and `pipemega.monitor`."""
    if page.stem == "CHANGELOG":
        pytest.skip("the changelog names modules that were moved")
    text = text_of(page)
    folders = "|".join(sorted({layer.partition("/")[0] for layer in LAYERS}))
    for path in re.findall(rf"`((?:{folders})/[\w/]+\.py)`", text):
        assert (ROOT / "pipemega" / path).is_file(), path
    for path in re.findall(r"`((?:tests|benchmarks|docs|pipemega|configs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`pipemega((?:\.\w+)+)", text):
        found: Any = pipemega
        for part in name[1:].split("."):
            if isinstance(found, ModuleType) and not hasattr(found, part):
                import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


def test_the_readme_links_each_page_once() -> None:
    targets = re.findall(r"\]\(([^)#:]+)", text_of(README))
    assert sorted({target for target in targets if targets.count(target) > 1}) == []


def test_the_readme_links_every_page_of_the_docs() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.]+\.md)", text_of(README)))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()
