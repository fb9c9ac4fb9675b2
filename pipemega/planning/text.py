"""A report as text, for a terminal of 80 columns and more."""

import textwrap
from collections.abc import Mapping, Sequence

from pipemega.planning.advice import Way
from pipemega.planning.quantities import show_bytes, show_count, show_time, unit_of
from pipemega.planning.report import Report

_LEFT = 12  # the column of the headings
_WIDEST = 120


def as_text(
    report: Report,
    warnings: Sequence[str],
    recommendation: str | None,
    ways: Sequence[Way],
    width: int = 80,
) -> str:
    """The whole report, lines no longer than `width` where words allow it."""
    width = max(60, min(width, _WIDEST))
    parts = [
        _entries(what_runs(report), width),
        _section("stages", stage_table(report), width, flexible=2),
        _section(memory_title(report), memory_table(report), width),
        _entries(what_it_takes(report), width),
    ]
    if report.others:
        parts.append(_section("schedules side by side", comparison_table(report), width))
        parts += [_entry("not possible", f"{n}: {why}", width) for n, why in report.refused.items()]
        parts.append(_entry("recommended", recommendation or "", width))
    said = [_entry("warning", text, width) for text in warnings]
    said += [_entry("note", text, width) for text in report.notes]
    if said:
        parts.append("\n".join(said))
    parts.append(_verdict(report, ways, width))
    return "\n\n".join(part for part in parts if part)


Rows = list[tuple[str, ...]]
"""The header, then the rows."""


def stage_table(report: Report) -> Rows:
    """Stages with their layers."""
    total = sum(stage.flops for stage in report.stages) or 1.0
    split = any(stage.kept is not None for stage in report.stages)
    header = ("stage", "rank", "layers", "parameters", "work", "held F to B")
    table: Rows = [(*header, "I to W") if split else header]
    for stage in report.stages:
        row = (
            str(stage.number),
            str(stage.rank),
            stage.layers,
            show_count(stage.parameters),
            f"{stage.flops / total:.1%}",
            show_bytes(stage.held),
        )
        table.append((*row, show_bytes(stage.kept or 0)) if split else row)
    return table


def memory_table(report: Report) -> Rows:
    """Bytes by pipeline rank, in one unit."""
    memory = report.outcome.memory
    _, unit = unit_of([rank.total for rank in memory])
    table: Rows = [
        (
            "rank",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "in flight",
            "buffers",
            "total",
        )
    ]
    for number, rank in enumerate(memory):
        parts = rank.footprint
        sizes = [
            parts.weights,
            parts.gradients,
            parts.masters + parts.optimizer,
            rank.activations,
            rank.buffers,
            rank.total,
        ]
        cells = [f"{size / unit:,.2f}" for size in sizes]
        table.append((str(number), *cells[:4], str(rank.held.in_flight), *cells[4:]))
    return table


def comparison_table(report: Report) -> Rows:
    """Schedules, the quickest first."""
    seconds, limit = report.request.rates.known, report.request.limit
    name, unit = unit_of([outcome.peak for outcome in report.others])
    header = (
        "",
        "schedule",
        "chunks",
        "makespan",
        "bubble",
        f"fullest, {name}",
        "messages",
        "sent",
    )
    table: Rows = [(*header, "fits") if limit is not None else header]
    for outcome in report.others:
        makespan = outcome.timeline.makespan
        row = (
            "*" if outcome is report.outcome else "",
            outcome.plan.name,
            str(outcome.chunks),
            show_time(makespan) if seconds else f"{makespan:.1f}",
            f"{outcome.timeline.bubble:.1%}",
            f"{outcome.peak / unit:,.2f}",
            f"{outcome.messages:,}",
            show_bytes(outcome.message_bytes),
        )
        table.append((*row, "yes" if outcome.fits(limit) else "no") if limit is not None else row)
    return table


def memory_title(report: Report) -> str:
    """Of the table of memory, with its unit."""
    return f"memory per rank, {unit_of([rank.total for rank in report.outcome.memory])[0]}"


def what_runs(report: Report) -> dict[str, str]:
    """Mesh, batch, model and schedule, in a line each."""
    topology, outcome = report.topology, report.outcome
    ranks = [
        f"{p}: {topology.rank(p, 0, 0)}"
        + (f"-{topology.rank(p, topology.data - 1, topology.tensor - 1)}" if size > 1 else "")
        for size in [topology.data * topology.tensor]
        for p in range(topology.pipeline)
    ]
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
    mesh = (
        f"{topology.world_size} ranks = pipeline {topology.pipeline} x data {topology.data} x "
        f"tensor {topology.tensor} (ranks by pipeline rank: {', '.join(shown)})"
    )
    stages = f"{outcome.chunks} stages" if outcome.chunks > 1 else "1 stage"
    model = report.request.config.model
    recompute: str = (
        model.recompute if model is not None and report.request.model is None else "none"
    )
    interval = report.request.config.pipeline.activation_checkpoint_interval
    if interval:
        recompute = f"every {interval} layers"
    return {
        "mesh": mesh,
        "batch": report.batch.equation.split("; ")[0],
        "model": f"{report.parameters:,} parameters, {report.num_layers} layers; "
        f"{report.precision}; recompute {recompute}",
        "schedule": f"{outcome.plan.name}, {stages} per rank, "
        f"{report.batch.num_microbatches} micro-batches",
    }


def what_it_takes(report: Report) -> dict[str, str]:
    """Bubble, time and traffic of a step, and what the hosts hold, in a line each."""
    outcome, rates = report.outcome, report.request.rates
    timeline = outcome.timeline
    bubble = f"{timeline.bubble:.1%} simulated"
    if outcome.bubble_formula is not None:
        bubble += f", {outcome.bubble_formula:.1%} by the formula for equal stages"
    lines = {"bubble": bubble}
    if rates.known:
        lines["step"] = f"{show_time(timeline.makespan)} of forward and backward"
        if report.tokens:
            rate = report.tokens / timeline.makespan
            lines["step"] += f": {rate:,.0f} tokens/s ({report.tokens:,} tokens a step)"
    else:
        lines["step"] = (
            f"{timeline.makespan:.1f} times a rank's mean forward, by FLOPs; for seconds give "
            f"--tflops or --costs"
        )
    pipelines = report.topology.data * report.topology.tensor
    along = f", along each of {pipelines} pipelines" if pipelines > 1 else ""
    sent = show_bytes(outcome.message_bytes)
    lines["traffic"] = f"{outcome.messages:,} messages, {sent} a step{along}"
    host = max(rank.footprint.host for rank in outcome.memory)
    if host:
        lines["host"] = f"{show_bytes(host)} of masters and optimizer state beside each device"
    return lines


def verdict_of(report: Report) -> tuple[str, str]:
    """Whether it fits, in a word and a line."""
    limit, peak = report.request.limit, report.outcome.peak
    kind = "a CPU" if report.request.device == "cpu" else "CUDA"
    rest = f"with the kernels of {kind}; without the device's own context and fragmentation"
    full = [rank.total for rank in report.outcome.memory].index(peak)
    if limit is None:
        return "fullest", f"pipeline rank {full}: {show_bytes(peak)}, {rest}"
    if peak <= limit:
        return "fits", f"{show_bytes(peak)} of {show_bytes(limit)} on pipeline rank {full}, {rest}"
    have = show_bytes(limit)
    return (
        "does not fit",
        f"pipeline rank {full} needs {show_bytes(peak)}, and there are {have}; {rest}",
    )


def _verdict(report: Report, ways: Sequence[Way], width: int) -> str:
    lines = [_entry(*verdict_of(report), width)]
    for way in ways:
        verdict = "fits" if way.fits else "not enough"
        lines.append(_entry("", f"{way.change}: {show_bytes(way.peak)}, {verdict}", width))
    return "\n".join(lines)


def _entries(lines: Mapping[str, str], width: int) -> str:
    return "\n".join(_entry(name, text, width) for name, text in lines.items())


def _entry(name: str, text: str, width: int) -> str:
    first = f"{name:<{_LEFT}}" if len(name) < _LEFT else f"{name}  "
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * _LEFT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _section(title: str, table: Rows, width: int, flexible: int | None = None) -> str:
    """A table under its title; numbers to the right, one column folded to fit."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if flexible is not None:
        others = sum(widths) - widths[flexible] + 2 * len(widths)
        widths[flexible] = min(widths[flexible], max(16, width - others))
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*table, strict=True)]
    lines = [title]
    for row in table:
        folded = [
            textwrap.wrap(cell, widths[i], break_on_hyphens=False) or [""]
            if i == flexible
            else [cell]
            for i, cell in enumerate(row)
        ]
        for line in range(max(map(len, folded))):
            cells = [
                f"{cell:>{size}}" if to_right else f"{cell:<{size}}"
                for column, size, to_right in zip(folded, widths, right, strict=True)
                for cell in [column[line] if line < len(column) else ""]
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
