"""The script of benchmarks/gpu_single on a CPU, and its memory estimate."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_single import run
from benchmarks.gpu_single.estimate import MODES, Sizes, estimate
from benchmarks.gpu_single.run import build, main
from benchmarks.pipeline_cpu.worker import peak_live_bytes
from pipemega.config import load
from pipemega.models import GPTConfig, gpt

# Enough samples that activations need more memory than the temporaries of the norm on a CPU.
SMALL = Sizes(hidden=64, layers=3, heads=2, seq=64, vocab=512, micro_batch=32, num_microbatches=2)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("benchmark") / "result.json"
    arguments = ["--device", "cpu", "--tiny", "--steps", "2", "--warmup", "1", "--json", str(path)]
    assert main(arguments) == 0
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def test_every_recompute_mode_gives_the_same_losses(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == list(MODES)
    assert rows["none"]["losses"] == rows["selective"]["losses"] == rows["full"]["losses"]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(128 / row["step_seconds"])
        assert row["mfu"] == {
            "measured": pytest.approx(row["tflops"] / report["peak_tflops"]["measured"]),
            "data_sheet": None,
        }


def test_fp16_halves_its_scale_at_each_overflow_and_a_skipped_step_changes_no_weights(
    report: dict[str, Any],
) -> None:
    steps = report["overflow"]["steps"]
    skipped = report["overflow"]["skipped"]
    assert skipped > 3
    assert [step["skipped"] for step in steps] == [True] * skipped + [False] * 5
    assert [step["unchanged"] for step in steps] == [True] * skipped + [False] * 5
    scales = [step["loss_scale"] for step in steps]
    assert scales == [2.0 ** (32 - min(number, skipped)) for number in range(len(steps))]


def test_the_report_is_markdown_with_the_command_that_made_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A compiler takes long on a CPU, and two rows show as much as all.
    items = {name: changes for name, changes in run.ITEMS.items() if "compile" not in changes}
    items = dict(list(items.items())[:2])
    monkeypatch.setattr(run, "ITEMS", items)
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--recompute",
        "full",
        "--items",
    ]
    assert main(arguments) == 0
    page = capsys.readouterr().out
    for name in items:
        assert f"| {name} |" in page
    assert "| full |" in page
    assert "| 0 | 4.29497e+09 |" in page
    assert "- fault: none" in page
    assert f"`python -m benchmarks.gpu_single.run {' '.join(arguments)}`" in page


def test_without_a_gpu_the_script_names_the_options_to_try_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().out


def test_the_estimated_parameters_are_those_of_the_model() -> None:
    section = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 64}
    config = load({"train_batch_size": 1, "model": section})
    net = gpt(GPTConfig.of(config, SMALL.vocab))
    tied_head = net.count_parameters()[-1]
    assert sum(net.count_parameters()) - tied_head == SMALL.parameters
    assert Sizes().parameters == pytest.approx(1.3e9, rel=0.02)


# With the large vocabulary the peak is at the loss, with the small one in backward of a layer.
@pytest.mark.parametrize(
    ("recompute", "vocab"),
    [
        ("full", 128),
        *(
            pytest.param(mode, vocab, marks=pytest.mark.sweep)
            for mode, vocab in (
                ("none", 512), ("none", 128), ("selective", 128), ("selective", 512), ("full", 512)
            )
        ),
    ],
)  # fmt: skip
def test_the_estimate_is_the_measured_peak_memory_of_a_step(
    recompute: Any, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's products of bf16 matrices need workspace that depends on the processor.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    sizes = replace(SMALL, vocab=vocab)

    def make_step() -> Callable[[int], float]:
        engine = build(sizes, recompute, torch.device("cpu"), bf16={"enabled": True})
        return lambda _: engine.train_batch()

    peak = peak_live_bytes(make_step, 2)
    assert peak == pytest.approx(estimate(sizes, recompute)["total"], rel=0.01)


def test_the_result_is_also_written_as_json(report: dict[str, Any], tmp_path: Path) -> None:
    assert set(report["machine"]) >= {"device", "driver", "torch", "cuda", "python"}
    assert report["sizes"]["tokens_per_step"] == 128
    assert report["command"].startswith("python -m benchmarks.gpu_single.run --device cpu --tiny")
