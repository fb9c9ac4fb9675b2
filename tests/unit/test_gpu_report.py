"""The page that `make gpu` writes, from results of a GPU that fails and of one that does not."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_report import run
from benchmarks.gpu_report.page import faults, markdown
from benchmarks.gpu_report.results import TestResults, describe, read_junit

GIB = 2**30
JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.gpu.test_engine" name="test_a"/>
<testcase classname="tests.gpu.test_engine" name="test_b[bf16]">
  <failure message="assert 1 == 2&#10; more">trace</failure></testcase>
<testcase classname="tests.gpu.test_schedules" name="test_c">
  <skipped type="pytest.skip" message="needs 4 CUDA devices, found 1">x</skipped></testcase>
<testcase classname="tests.gpu.test_schedules" name="test_d">
  <skipped type="pytest.skip" message="needs 4 CUDA devices, found 1">x</skipped></testcase>
</testsuite></testsuites>"""
BENCHMARK: dict[str, Any] = {
    "command": "python -m benchmarks.gpu_single.run",
    "machine": {"driver": "580.1", "torch": "2.13.0", "cuda": "13.0", "python": "3.12"},
    "sizes": {"parameters": 1_300_000_000, "tokens_per_step": 65536},
    "attention": "flash_attention",
    "peak_tflops": {"measured": 700.0, "data_sheet": 989.0},
    "rows": [
        {
            "name": "none", "error": None, "tokens_per_second": 41234.5,
            "mfu": {"measured": 0.52, "data_sheet": None},
            "peak_bytes": 55 * GIB, "planned_bytes": 50 * GIB,
        },
        {"name": "full", "error": "out of memory: 3 | 4"},
    ],
    "faults": ["full: out of memory"],
}  # fmt: skip
DOCTOR = {
    "ok": True,
    "checks": [
        {"status": "ok", "check": "ranks", "text": "4 of 4", "remedy": ""},
        {"status": "warning", "check": "memory", "text": "a GPU is in use", "remedy": "end it"},
    ],
}


SMOKE = {"loss": 5.6231, "seconds": 0.25}


def test_the_results_of_pytest_are_counted_by_reason() -> None:
    assert read_junit(JUNIT) == TestResults(
        1, {"test_engine::test_b[bf16]": "assert 1 == 2"}, {"needs 4 CUDA devices, found 1": 2}
    )


def test_the_page_names_versions_tests_speed_memory_and_checks() -> None:
    versions = {"pipemega": "0.1.0", "commit": "abc", "GPUs": "4 x H100", "NCCL": "2.29.3"}
    at = datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)
    page = markdown(versions, read_junit(JUNIT), BENCHMARK, DOCTOR, SMOKE, at).splitlines()
    assert page[2] == "Result: 1 tests failed; benchmark: full: out of memory."
    for line in (
        "| GPUs | 4 x H100 |",
        "| NCCL | 2.29.3 |",
        "| driver | 580.1 |",
        "A tiny GPT: loss 5.6231, 0.25 s.",
        "| date | 2026-01-02 03:04 UTC |",
        "1 passed, 1 failed, 2 skipped.",
        "- failed: `test_engine::test_b[bf16]`: assert 1 == 2",
        "- skipped: 2 x needs 4 CUDA devices, found 1",
        "| none | 41234 | 52.0% | unknown | 55 | 50 | 1.100 |",
        "| full | out of memory: 3 / 4 | | | | | |",
        "| warning | memory | a GPU is in use; end it |",
    ):
        assert line in page


def test_a_part_without_results_is_a_fault_and_still_gives_a_page() -> None:
    failed = (
        TestResults(error="pytest ended with exit code 4"), {"error": "code 1"}, {"error": "x"},
        {"error": "one step"},
    )  # fmt: skip
    assert faults(*failed) == [
        "tests: pytest ended with exit code 4",
        "doctor: x",
        "one step: one step",
        "benchmark: code 1",
    ]
    page = markdown(describe(), *failed)
    assert "No results: code 1." in page
    assert faults(TestResults(3), {"faults": []}, DOCTOR, SMOKE) == []
    failed = faults(TestResults(3), {"faults": []}, {"ok": False}, SMOKE)
    assert failed == ["doctor: a check failed"]


def test_each_part_is_in_the_report_when_it_ends_and_one_part_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pages, limits = tmp_path / "report.md", list[str](), dict[str, float]()

    def part(name: str, result: Any) -> Any:
        def run_part(*arguments: Any) -> Any:
            pages.append(out.read_text(encoding="utf-8") if out.exists() else "")
            limits[name] = next(a for a in arguments if isinstance(a, float))
            if isinstance(result, Exception):
                raise result
            return result

        return run_part

    results = {
        "run_doctor": DOCTOR,
        "run_smoke": RuntimeError("no kernel image"),
        "run_benchmark": BENCHMARK,
        "run_tests": TestResults(7),
    }
    for name, result in results.items():
        monkeypatch.setattr(run, name, part(name, result))
    words = ["--device", "cpu", "--out", str(out), "--minutes", "8"]
    assert run.main(words) == 1
    order = ["## One step\n\nNo result: not run.", "No result: RuntimeError: no kernel image."]
    assert [pages[1], pages[2]] == [
        page for page, text in zip(pages[1:3], order, strict=True) if text in page
    ]
    text = out.read_text(encoding="utf-8")
    assert "a GPU is in use" in text
    assert "7 passed, 0 failed" in text
    assert limits["run_doctor"] < limits["run_benchmark"] < limits["run_tests"] <= 8 * 60
    monkeypatch.setattr(run, "run_smoke", part("run_smoke", SMOKE))
    pages.clear()
    run.main([*words, "--part", "smoke"])
    assert len(pages) == 1
    text = out.read_text(encoding="utf-8")
    assert "A tiny GPT: loss 5.6231" in text
    assert "7 passed, 0 failed" in text


def test_without_a_gpu_the_script_names_the_option_to_try_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "benchmarks.gpu_report.run --device cpu" in capsys.readouterr().err


@pytest.mark.sweep
def test_the_script_writes_its_page_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    assert run.main(["--device", "cpu", "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "Result: ok." in text
    assert " passed, 0 failed, " in text
