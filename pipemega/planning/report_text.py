"""The report as text, for a terminal with at least 60 columns."""

import textwrap
from collections.abc import Mapping
from itertools import zip_longest

from pipemega.config.model_transformer import TransformerSection
from pipemega.planning.advice import Advice, better_cut
from pipemega.planning.estimate import Report
from pipemega.planning.units import (
    show_bytes,
    show_count,
    show_duration,
    show_percent,
    show_time,
    three,
    unit_of,
)
from pipemega.printing import percent

_LABEL_WIDTH = 12
_MIN_WIDTH, _MAX_WIDTH = 60, 120

# A header, then the rows of the table.
Rows = list[tuple[str, ...]]


def as_text(report: Report, advice: Advice, width: int = 80) -> str:
    """Return the whole report, with lines of at most `width` characters if words allow it."""
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    parts = [
        _entries(summary(report), width),
        _section("stages", stage_table(report), width, flexible=2),
        _section(memory_title(report), memory_table(report), width),
        _entries(step_summary(report), width),
    ]
    if report.compared:
        parts.append(_section("schedule comparison", comparison_table(report), width))
        parts += [_entry("not possible", f"{n}: {why}", width) for n, why in report.refused.items()]
        parts.append(_entry("recommended", advice.recommendation or "", width))
    remarks = [_entry("warning", text, width) for text in advice.warnings]
    remarks += [_entry("note", text, width) for text in report.notes]
    if remarks:
        parts.append("\n".join(remarks))
    lines = [_entry(*verdict(report), width)]
    for change, peak, fits in advice.suggestions:
        text = f"{change}: {show_bytes(peak)}, {'fits' if fits else 'not enough'}"
        lines.append(_entry("", text, width))
    lines += [_entry(label, text, width) for label, text in unused_memory(report, advice)]
    return "\n\n".join([*parts, "\n".join(lines)])


def stage_table(report: Report) -> Rows:
    """Return the table of stages."""
    total = sum(stage.flops for stage in report.stages) or 1.0
    rows = []
    for stage in report.stages:
        row = {
            "stage": str(stage.number),
            "rank": str(stage.rank),
            "layers": stage.layers,
            "parameters": show_count(stage.parameters),
            "FLOPs": show_percent(stage.flops / total),
            "time": show_percent(stage.time),
            "kept F to B": show_bytes(stage.held),
        }
        if stage.kept is not None:
            row["I to W"] = show_bytes(stage.kept)
        rows.append(row)
    return _with_header(rows)


def memory_table(report: Report) -> Rows:
    """Return the table of memory by pipeline rank, in one unit."""
    memory = report.prediction.memory
    mixed = len({rank.device for rank in memory}) > 1
    _, unit = unit_of([rank.total for rank in memory])
    rows = []
    for number, rank in enumerate(memory):
        parts = rank.footprint
        row = {
            "rank": f"{number} ({rank.device})" if mixed else str(number),
            "weights": three(parts.weights / unit),
            "gradients": three(parts.gradients / unit),
            "optimizer": three((parts.masters + parts.optimizer) / unit),
            "activations": three(rank.activations / unit),
            "in flight": str(rank.schedule_peak.in_flight),
            "buffers": three(rank.buffers / unit),
            "total": three(rank.total / unit),
        }
        rows.append(row)
    return _with_header(rows)


def comparison_table(report: Report) -> Rows:
    """Return the table of compared schedules, fastest first."""
    seconds, limit = report.request.rates.known, report.request.limit
    name, unit = unit_of([prediction.peak for prediction in report.compared])
    rows = []
    for prediction in report.compared:
        makespan = prediction.timeline.makespan
        row = {
            "": "*" if prediction is report.prediction else "",
            "schedule": prediction.plan.name,
            "chunks": str(prediction.chunks),
            "makespan": show_time(makespan) if seconds else three(makespan),
            "bubble": show_percent(prediction.timeline.bubble),
            f"peak, {name}": three(prediction.peak / unit),
            "messages": f"{prediction.messages:,}",
            "sent": show_bytes(prediction.message_bytes),
        }
        if limit is not None:
            row["fits"] = "yes" if prediction.fits(limit) else "no"
        rows.append(row)
    return _with_header(rows)


def _with_header(rows: list[dict[str, str]]) -> Rows:
    return [tuple(rows[0]), *(tuple(row.values()) for row in rows)]


def memory_title(report: Report) -> str:
    """Return the title of the table of memory, with its unit."""
    return f"memory per rank, {unit_of([rank.total for rank in report.prediction.memory])[0]}"


def summary(report: Report) -> dict[str, str]:
    """Return one line each for mesh, batch, model and schedule."""
    topology, prediction, request = report.topology, report.prediction, report.request
    ranks = []
    for p in range(topology.pipeline):
        first = topology.rank(p, 0, 0)
        last = topology.rank(p, topology.data - 1, topology.tensor - 1)
        ranks.append(f"{p}: {first}" if first == last else f"{p}: {first}-{last}")
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
    mesh = (
        f"{topology.world_size} ranks = pipeline {topology.pipeline} x data {topology.data} x "
        f"tensor {topology.tensor} (ranks by pipeline rank: {', '.join(shown)})"
    )
    stages = f"{prediction.chunks} stages" if prediction.chunks > 1 else "1 stage"
    model = request.config.model
    recompute = "none"
    if isinstance(model, TransformerSection) and request.model is None:
        recompute = model.recompute
        if model.recompute_method is not None:
            recompute += f", {model.recompute_method} {model.recompute_num_layers}"
    interval = request.config.pipeline.activation_checkpoint_interval
    if interval:
        recompute = f"every {interval} layers"
    return {
        "mesh": mesh,
        "batch": report.batch.equation.split("; ")[0],
        "model": f"{report.parameters:,} parameters, {report.num_layers} layers; "
        f"{report.precision}; recompute {recompute}",
        "schedule": f"{prediction.plan.name}, {stages} per rank, "
        f"{report.batch.num_microbatches} micro-batches",
    }


def step_summary(report: Report) -> dict[str, str]:
    """Return one line each for bubble, time, traffic and communicators, and used host memory."""
    prediction, timeline = report.prediction, report.prediction.timeline
    bubble = f"{show_percent(timeline.bubble)} simulated"
    if prediction.bubble_formula is not None:
        bubble += f", {show_percent(prediction.bubble_formula)} by the formula for equal stages"
    lines = {"cut": cut_line(report), "bubble": bubble} if report.cut else {"bubble": bubble}
    if report.request.rates.known:
        lines["step"] = f"{show_time(timeline.makespan)} for forward and backward"
        if report.tokens:
            rate = report.tokens / timeline.makespan
            lines["step"] += f": {rate:,.0f} tokens/s ({report.tokens:,} tokens per step)"
    else:
        lines["step"] = (
            f"{three(timeline.makespan)} times the mean forward of a rank, by FLOPs; give "
            f"--tflops or --costs to see seconds"
        )
    lines |= _finish(report)
    pipelines = report.topology.data * report.topology.tensor
    each = f" in each of {pipelines} pipelines" if pipelines > 1 else ""
    sent = show_bytes(prediction.message_bytes)
    lines["traffic"] = f"{prediction.messages:,} messages, {sent} per step{each}"
    if report.communicators is not None:
        lines["NCCL"] = f"at most {report.communicators} communicators per rank"
    host = max(rank.footprint.host for rank in prediction.memory)
    staging = max(rank.footprint.staging for rank in prediction.memory)
    uses = []
    if host:
        uses.append(
            f"{show_bytes(host)} of host memory per rank for offloaded masters, their gradients "
            f"and optimizer state"
        )
    if staging:
        uses.append(
            f"{show_bytes(staging)} of host memory per rank for the copy of a checkpoint "
            f"(checkpoint.async)"
        )
    if uses:
        lines["host"] = "; ".join(uses)
    return lines


def cut_line(report: Report) -> str:
    """Return what the cut costs, and what a better one would give."""
    cut = report.cut
    assert cut is not None
    text = (
        f"{list(cut.bounds)}: the slowest rank takes {percent(cut.imbalance)} longer than the mean "
        f"(column time, which counts memory traffic besides FLOPs)"
    )
    better = better_cut(report)
    return f"{text}; no faster cut was found" if better is None else f"{text}; {better}"


def _finish(report: Report) -> dict[str, str]:
    """Return the line about the whole run; none if its number of steps is not known."""
    steps, tokens = report.run_steps, report.run_tokens
    if steps is None:
        return {}
    length = f"{steps:,} steps"
    if tokens:
        length = f"{show_count(tokens)} tokens in {length}"
    seconds = report.run_seconds
    if seconds is None:
        return {"run": f"{length}; give --tflops or --costs to see the days"}
    rate = f" at {tokens / seconds:,.0f} tokens/s" if tokens else ""
    return {
        "run": f"{length}: {show_duration(seconds)}{rate}, without the optimizer step, the "
        "reduction of gradients, evaluation and checkpoints"
    }


def unused_memory(report: Report, advice: Advice) -> list[tuple[str, str]]:
    """Return (label, text) of what could be done with memory that the run does not use."""
    limit = report.request.limit
    if limit is None or not report.fits:
        return []
    free = f"{show_bytes(limit - report.prediction.peak)} of {show_bytes(limit)} are unused"
    if not advice.alternatives:
        return [("unused", f"{free}; no change that was tried fits and is 2% faster")]
    lines = [("unused", f"{free}; faster changes that fit, by this prediction:")]
    for change, gain, peak in advice.alternatives:
        lines.append(("", f"{change}: {show_percent(gain)} faster, {show_bytes(peak)}"))
    return lines


def verdict(report: Report) -> tuple[str, str]:
    """Return (label, text): whether the run fits, with the memory of the fullest rank."""
    limit, peak = report.request.limit, report.prediction.peak
    if report.request.device == "cpu":
        assumption = "assumes CPU kernels; leave room for fragmentation"
    else:
        assumption = "assumes CUDA kernels; leave room for the CUDA context and fragmentation"
    rank = [memory.total for memory in report.prediction.memory].index(peak)
    if limit is None:
        return "peak", f"{show_bytes(peak)} on pipeline rank {rank}; {assumption}"
    need, have = show_bytes(peak), show_bytes(limit)
    if peak <= limit:
        return "fits", f"{need} of {have} on pipeline rank {rank}; {assumption}"
    return "does not fit", f"pipeline rank {rank} needs {need} and has {have}; {assumption}"


def _entries(lines: Mapping[str, str], width: int) -> str:
    return "\n".join(_entry(name, text, width) for name, text in lines.items())


def _entry(name: str, text: str, width: int) -> str:
    first = f"{name:<{_LABEL_WIDTH}}" if len(name) < _LABEL_WIDTH else f"{name}  "
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _section(title: str, table: Rows, width: int, flexible: int | None = None) -> str:
    """Format a table; numbers are right-aligned, the column `flexible` is wrapped to fit."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if flexible is not None:
        others = sum(widths) - widths[flexible] + 2 * len(widths)
        widths[flexible] = min(widths[flexible], max(16, width - others))
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*table, strict=True)]
    lines = [title]
    for row in table:
        wrapped = [
            textwrap.wrap(cell, widths[i], break_on_hyphens=False) or [""]
            if i == flexible
            else [cell]
            for i, cell in enumerate(row)
        ]
        for cells in zip_longest(*wrapped, fillvalue=""):
            aligned = [
                cell.rjust(size) if to_right else cell.ljust(size)
                for cell, size, to_right in zip(cells, widths, right, strict=True)
            ]
            lines.append(("  " + "  ".join(aligned)).rstrip())
    return "\n".join(lines)
