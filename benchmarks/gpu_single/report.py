"""Formats the results of `run.py` as markdown."""

from typing import Any

_GIB = 2**30
_PARTS = ("forward", "backward", "optimizer")


def markdown(report: dict[str, Any]) -> str:
    """Return the machine, tables of speed and of memory by part, and the steps in fp16."""
    machine, sizes, peaks = report["machine"], report["sizes"], report["peak_tflops"]
    gib = f", {machine['memory_bytes'] / _GIB:.0f} GiB" if machine["memory_bytes"] else ""
    sheet = f", by the data sheet {peaks['data_sheet']:.0f}" if peaks["data_sheet"] else ""
    n = report["options"]["matrix"]
    lines = [
        f"{machine['device']}{gib}, driver {machine['driver'] or 'none'}, torch "
        f"{machine['torch']}, CUDA {machine['cuda'] or 'none'}, Python {machine['python']}; "
        f"{machine['kernels']}; attention: {report['attention']}.",
        "",
        f"GPT of {sizes['parameters']:,} parameters: hidden {sizes['hidden']}, "
        f"{sizes['layers']} layers, {sizes['heads']} heads, sequence {sizes['seq']}, vocabulary "
        f"{sizes['vocab']}; {sizes['num_microbatches']} micro-batches of {sizes['micro_batch']} a "
        f"step; bf16, AdamW. Median of {report['options']['steps']} steps after "
        f"{report['options']['warmup']}.",
        "",
        f"A bf16 product of {n} x {n} matrices runs at {peaks['measured']:.4g} TFLOP/s{sheet}.",
        "",
        *_speed(report["rows"]),
        "",
        *_memory(report["rows"]),
        "",
        *_overflow(report["overflow"]),
        "",
        *(f"- fault: {fault}" for fault in report["faults"] or ["none"]),
        "",
        f"`{report['command']}`",
    ]
    return "\n".join(lines)


def _speed(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| recompute, or item | step, ms | tokens/s | TFLOP/s | MFU, of measured | of data sheet "
        "| pipemega plan | forward, ms | backward, ms | optimizer, ms | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['name']} | {row['error']} |")
            continue
        parts = [
            f"{row['part_seconds'][p] * 1e3:.1f}" for p in ("forward", "backward", "optimizer")
        ]
        sheet = row["mfu"]["data_sheet"]
        cells = [
            row["name"],
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['tflops']:.4g}",
            f"{row['mfu']['measured']:.1%}",
            f"{sheet:.1%}" if sheet else "unknown",
            f"{row['planned_mfu']:.1%}" if row["planned_mfu"] else "unknown",
            *parts,
            f"{row['losses'][-1]:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    rows = [row for row in rows if not row["error"]]
    names = list(rows[0]["estimate_bytes"]) if rows else []
    lines = [
        f"| GiB | {' | '.join(f'{name}, estimated' for name in names)} | pipemega plan "
        f"| peak, measured | measured / estimated | measured / plan |",
        f"| --- |{' ---: |' * (len(names) + 4)}",
    ]
    for row in rows:
        parts, peak = row["estimate_bytes"], row["peak_bytes"]
        cells = [f"{parts[name] / _GIB:.3g}" for name in names]
        planned = row["planned_bytes"]
        cells += [f"{planned / _GIB:.3g}", f"{peak / _GIB:.3g}"]
        cells += [f"{peak / parts['total']:.3f}", f"{peak / planned:.3f}"]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines if rows else []


def _overflow(fp16: dict[str, Any]) -> list[str]:
    if fp16["error"]:
        return [f"fp16: {fp16['error']}"]
    lines = [
        f"fp16, from a loss scale that is too high: {fp16['skipped']} steps skipped, "
        f"{'recovered' if fp16['recovered'] else 'NOT RECOVERED'}.",
        "",
        "| step | loss scale | loss | gradient norm | skipped | weights unchanged |",
        "| ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for number, step in enumerate(fp16["steps"]):
        flags = ["yes" if step[key] else "no" for key in ("skipped", "unchanged")]
        lines.append(
            f"| {number} | {step['loss_scale']:g} | {step['loss']:.4f} | {step['grad_norm']:.4g} "
            f"| {' | '.join(flags)} |"
        )
    return lines
