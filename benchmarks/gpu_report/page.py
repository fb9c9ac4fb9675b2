"""Formats the results as a page that a user can send."""

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from benchmarks.gpu_report.results import TestResults

_GIB = 2**30


def faults(
    tests: TestResults,
    benchmark: dict[str, Any],
    doctor: dict[str, Any],
    smoke: dict[str, Any],
) -> list[str]:
    """Return why the report is not good; empty if it is."""
    found = [f"tests: {tests.error}"] if tests.error else []
    found += [f"{len(tests.failed)} tests failed"] if tests.failed else []
    found += [f"doctor: {doctor['error']}"] if "error" in doctor else []
    found += ["doctor: a check failed"] if not doctor.get("ok", True) else []
    found += [f"one step: {smoke['error']}"] if "error" in smoke else []
    found += [f"benchmark: {benchmark['error']}"] if "error" in benchmark else []
    return [*found, *(f"benchmark: {fault}" for fault in benchmark.get("faults", ()))]


def markdown(
    versions: dict[str, str],
    tests: TestResults,
    benchmark: dict[str, Any],
    doctor: dict[str, Any],
    smoke: dict[str, Any],
    at: datetime | None = None,
) -> str:
    """Return the page.

    Args:
        versions: the result of `results.describe`.
        benchmark: JSON values of benchmarks/gpu_single, or an error.
        doctor: JSON values of `pipemega doctor`, or an error.
        smoke: the loss and the seconds of one step, or an error.
        at: the time of the report; None: now.
    """
    machine = benchmark.get("machine", {})
    found = faults(tests, benchmark, doctor, smoke)
    values = {
        **versions,
        "driver": machine.get("driver") or "none",
        "torch": machine.get("torch", "unknown"),
        "CUDA": machine.get("cuda") or "none",
        "Python": machine.get("python", "unknown"),
        "system": machine.get("system", "unknown"),
        "date": f"{at or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }
    lines = [
        "# GPU report of pipemega",
        "",
        f"Result: {'; '.join(found) if found else 'ok'}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in values.items()),
        "",
        "## pipemega doctor",
        "",
        *_doctor(doctor),
        "",
        "## One step",
        "",
        f"No result: {smoke['error']}."
        if "error" in smoke
        else f"A tiny GPT: loss {smoke['loss']:.4f}, {smoke['seconds']:.2f} s.",
        "",
        "## Benchmark",
        "",
        *_benchmark(benchmark),
        "",
        "## Tests",
        "",
        *_tests(tests),
    ]
    return "\n".join(lines) + "\n"


def _tests(tests: TestResults) -> Iterator[str]:
    if tests.error:
        yield f"Results are missing: {tests.error}."
        yield ""
    skipped = sum(tests.skipped.values())
    yield f"{tests.passed} passed, {len(tests.failed)} failed, {skipped} skipped."
    if tests.failed or tests.skipped:
        yield ""
    for name, message in tests.failed.items():
        yield f"- failed: `{name}`: {_cell(message)}"
    for reason, count in sorted(tests.skipped.items()):
        yield f"- skipped: {count} x {_cell(reason)}"


def _benchmark(benchmark: dict[str, Any]) -> Iterator[str]:
    if "error" in benchmark:
        yield f"No results: {benchmark['error']}."
        return
    sizes = benchmark["sizes"]
    yield (
        f"GPT of {sizes['parameters']:,} parameters, {sizes['tokens_per_step']:,} tokens per step, "
        f"bf16, on one device; a bf16 matrix product runs at "
        f"{benchmark['peak_tflops']['measured']:.4g} TFLOP/s; attention: {benchmark['attention']}."
    )
    yield ""
    yield (
        "| recompute | tokens/s | MFU, of measured | MFU, of data sheet | memory, GiB "
        "| pipemega plan, GiB | measured / plan |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in benchmark["rows"]:
        if row["error"]:
            yield f"| {row['name']} | {_cell(row['error'])} | | | | | |"
            continue
        shares = [f"{row['mfu'][name]:.1%}" if row["mfu"][name] else "unknown"
                  for name in ("measured", "data_sheet")]  # fmt: skip
        peak, planned = row["peak_bytes"], row["planned_bytes"]
        cells = [row["name"], f"{row['tokens_per_second']:.0f}", *shares]
        cells += [f"{peak / _GIB:.3g}", f"{planned / _GIB:.3g}", f"{peak / planned:.3f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for fault in benchmark["faults"] or ["none"]:
        yield f"- fault: {fault}"
    yield f"- command: `{benchmark['command']}`"


def _doctor(doctor: dict[str, Any]) -> Iterator[str]:
    if "error" in doctor:
        yield f"No results: {doctor['error']}."
        return
    yield "| status | check | |"
    yield "| --- | --- | --- |"
    for check in doctor["checks"]:
        text = "; ".join(filter(None, (check["text"], check["remedy"])))
        yield f"| {check['status']} | {check['check']} | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
