"""The report as text, for a terminal with at least 60 columns.

The report as JSON values, for scripts.

The report for pictures and the HTML page: timelines with memory, verdict, bars and tables.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from pipemega.config.sections.transformer_sections import TransformerSection
from pipemega.distributed.topology import Topology
from pipemega.pipeline.visualize import Bars, Intro, Panel, Table, Verdict
from pipemega.planning.advice import TriedChange
from pipemega.planning.estimate import Report
from pipemega.planning.prediction import CutReport, Prediction
from pipemega.planning.throughput import Efficiency, efficiency
from pipemega.printing import (
    percent,
    show_bytes,
    show_count,
    show_duration,
    show_percent,
    show_time,
    three,
    unit_of,
)

_LABEL_WIDTH = 12
_MIN_WIDTH, _MAX_WIDTH = 60, 120
# A cut is better if the step of the current one takes this fraction longer.
_BETTER_CUT = 0.001


def as_text(report: Report, changes: Sequence[TriedChange], width: int = 80) -> str:
    """Return the whole report, with lines of at most `width` characters if words allow it.

    Args:
        changes: the tried changes of the config, which are listed at the end.
    """
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    parts = [
        _entries(summary_rows(report), width),
        _section(stage_table(report), width, flexible=2),
        _section(memory_table(report), width),
        _entries(step_summary(report), width),
    ]
    found = efficiency(report)
    if found is not None:
        parts.append(_entries(efficiency_lines(found), width))
        parts.append(_section(item_table(found), width))
    if report.compared:
        parts.append(_section(comparison_table(report), width))
        parts += [_entry("not possible", f"{n}: {why}", width) for n, why in report.refused.items()]
    if report.notes:
        parts.append("\n".join(_entry("note", text, width) for text in report.notes))
    parts.append(_entry(*verdict(report), width))
    if changes:
        parts.append(_section(change_table(report, changes), width, flexible=0))
    return "\n\n".join(parts)


def stage_table(report: Report) -> Table:
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
    return _table("stages", rows)


def memory_table(report: Report) -> Table:
    """Return the table of memory by pipeline rank, in one unit."""
    memory = report.prediction.memory
    mixed = len({rank.device for rank in memory}) > 1
    unit_name, unit = unit_of([rank.total for rank in memory])
    rows = []
    for number, rank in enumerate(memory):
        row = {"rank": f"{number} ({rank.device})" if mixed else str(number)}
        for name, size in rank.parts.items():
            row[name] = three(size / unit)
            if name == "activations":
                row["in flight"] = str(rank.schedule_peak.in_flight)
        row["total"] = three(rank.total / unit)
        rows.append(row)
    return _table(f"memory per rank, {unit_name}", rows)


def comparison_table(report: Report) -> Table:
    """Return the table of compared schedules, fastest first; * marks the configured one."""
    in_seconds, limit = report.request.rates.known, report.request.limit
    name, unit = unit_of([prediction.peak for prediction in report.compared])
    rows = []
    for prediction in report.compared:
        makespan = prediction.timeline.makespan
        row = {
            "": "*" if prediction is report.prediction else "",
            "schedule": prediction.plan.name,
            "chunks": str(prediction.chunks),
            "makespan": show_time(makespan) if in_seconds else three(makespan),
            "bubble": show_percent(prediction.timeline.bubble),
            f"peak, {name}": three(prediction.peak / unit),
            "messages": f"{prediction.messages:,}",
            "sent": show_bytes(prediction.message_bytes),
        }
        if limit is not None:
            row["fits"] = "yes" if prediction.fits(limit) else "no"
        rows.append(row)
    return _table("schedule comparison", rows)


def efficiency_lines(found: Efficiency) -> dict[str, str]:
    """Return the estimated MFU, and the shares of a step."""
    shares = ", ".join(f"{name} {show_percent(share)}" for name, share in found.shares.items())
    return {
        "MFU": f"{show_percent(found.mfu)} of the bf16 peak of {found.device}, an estimate; a step "
        f"of {show_time(found.seconds)}: {shares}"
    }


def item_table(found: Efficiency) -> Table:
    """Return the MFU with each throughput item on and off."""
    rows = [
        {
            "item": item.name,
            "key": item.key,
            "now": "on" if item.is_on else "off",
            "off": show_percent(found.mfu_with(item, is_on=False)),
            "on": show_percent(found.mfu_with(item, is_on=True)),
        }
        for item in found.items
    ]
    return _table("MFU with each item off and on", rows)


def change_table(report: Report, changes: Sequence[TriedChange]) -> Table:
    """Return the table of changes of the config, with what they add to the time of a step."""
    title = "faster changes that fit" if report.fits else "changes that make it fit"
    if not changes[0].fits:
        title = "changes that reduce memory, not enough"
    rows = []
    for change, _, gain, peak, _ in changes:
        time = {} if gain is None else {"step time": percent(-gain, signed=True)}
        rows.append({"change": change, **time, "peak": show_bytes(peak)})
    return _table(title, rows)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    return Table(title, tuple(rows[0]), [tuple(row.values()) for row in rows])


def summary_rows(report: Report) -> dict[str, str]:
    """Return one line each for mesh, batch, model and schedule."""
    topology, prediction, request = report.topology, report.prediction, report.request
    ranks = [
        f"{p}: {first}" if first == last else f"{p}: {first}-{last}"
        for p, (first, last) in enumerate(_ranks(topology))
    ]
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
    experts = f", expert {topology.expert}" if topology.expert > 1 else ""
    mesh = (
        f"{topology.world_size} ranks = pipeline {topology.pipeline} x data {topology.data} x "
        f"tensor {topology.tensor}{experts} (ranks by pipeline rank: {', '.join(shown)})"
    )
    stages = f"{prediction.chunks} stages" if prediction.chunks > 1 else "1 stage"
    model = request.config.model
    recompute = "none"
    if isinstance(model, TransformerSection) and request.model is None:
        recompute = model.recompute
        if model.recompute_method is not None:
            recompute += f", {model.recompute_method} {model.recompute_num_layers}"
        if model.recompute_keep is not None:
            recompute += f", keeps {' and '.join(model.recompute_keep)}"
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


def _ranks(topology: Topology) -> list[list[int]]:
    """Return the first and the last rank of each pipeline rank."""
    last = topology.data - 1, topology.tensor - 1
    return [[topology.rank(p, 0, 0), topology.rank(p, *last)] for p in range(topology.pipeline)]


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
    if exchanged := max(prediction.exchanged):
        lines["experts"] = (
            f"a rank sends {show_bytes(exchanged)} of tokens per step to the others of "
            f"{report.topology.expert} expert ranks; times and memory assume that all experts get "
            f"equally many"
        )
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
    peaks = [rank.schedule_peak for rank in prediction.memory]
    if any(peak.moved for peak in peaks):
        uses.append(
            f"{show_bytes(max(peak.host for peak in peaks))} of host memory per rank for "
            f"activations, and {show_bytes(max(peak.moved for peak in peaks))} per step and rank "
            "that are copied to it and back (activation_checkpointing.cpu_checkpointing)"
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
    if cut.slower < _BETTER_CUT:
        return f"{text}; no faster cut was found"
    change = f"pipeline.partition to {list(cut.best)}"
    if report.request.config.pipeline.partition != "auto":
        change = f"pipeline.partition to 'auto', or to {list(cut.best)}"
    return (
        f"{text}; set {change}: the step is {percent(1 - 1 / (1 + cut.slower))} shorter, peak "
        f"memory {show_bytes(cut.best_peak)} instead of {show_bytes(report.prediction.peak)}"
    )


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


def verdict(report: Report) -> tuple[str, str]:
    """Return (label, text): whether the run fits, with the memory of the fullest rank."""
    limit, peak = report.request.limit, report.prediction.peak
    if report.request.device == "cpu":
        assumption = "assumes CPU kernels; leave room for fragmentation"
    else:
        assumption = "assumes CUDA kernels; leave room for the CUDA context and fragmentation"
    rank = report.prediction.fullest_rank
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


def _section(table: Table, width: int, flexible: int | None = None) -> str:
    """Format a table; numbers are right-aligned, the column `flexible` is wrapped to fit."""
    columns = list(zip(table.header, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if flexible is not None:
        others = sum(widths) - widths[flexible] + 2 * len(widths)
        widths[flexible] = min(widths[flexible], max(16, width - others))
    right = [all(cell.lstrip("+-")[:1].isdigit() for cell in column[1:]) for column in columns]
    lines = [table.title]
    for row in (table.header, *table.rows):
        wrapped = [
            _wrap(cell, widths[i]) if i == flexible else [cell] for i, cell in enumerate(row)
        ]
        for cells in zip_longest(*wrapped, fillvalue=""):
            aligned = [
                cell.rjust(size) if to_right else cell.ljust(size)
                for cell, size, to_right in zip(cells, widths, right, strict=True)
            ]
            lines.append(("  " + "  ".join(aligned)).rstrip())
    return "\n".join(lines)


def _wrap(cell: str, width: int) -> list[str]:
    # An option stays on one line with its value.
    lines = textwrap.wrap(
        cell.replace("--set ", "--set\xa0"), width, subsequent_indent="  ", break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def as_json(report: Report, changes: Sequence[TriedChange]) -> dict[str, Any]:
    """Return the report as JSON values: sizes in bytes, times in seconds if they are known."""
    topology, request = report.topology, report.request
    return {
        "mesh": {
            "world": topology.world_size,
            "pipeline": topology.pipeline,
            "data": topology.data,
            "tensor": topology.tensor,
            "expert": topology.expert,
            "ranks": _ranks(topology),
        },
        "batch": {
            "train_batch_size": report.batch.train_batch_size,
            "micro_batch_size": report.batch.micro_batch_size,
            "num_microbatches": report.batch.num_microbatches,
            "tokens": report.tokens,
        },
        "model": {
            "parameters": report.parameters,
            "layers": report.num_layers,
            "precision": report.precision,
        },
        "stages": [vars(stage) for stage in report.stages],
        "cut": None if report.cut is None else _cut(report.cut),
        "nccl_communicators": report.communicators,
        "exchanged_bytes": report.prediction.exchanged,
        "device": {"type": request.device, "memory": request.limit},
        "time_unit": "seconds" if request.rates.known else "mean forward of a rank",
        "outcome": _prediction(report.prediction, report),
        "efficiency": _efficiency(efficiency(report)),
        "compare": [_prediction(other, report) for other in report.compared],
        "refused": report.refused,
        "fits": report.fits,
        "changes": [change._asdict() for change in changes],
        "train_steps": report.run_steps,
        "run_seconds": report.run_seconds,
        "tflops": request.rates.tflops,
        "notes": list(report.notes),
    }


def _efficiency(found: Efficiency | None) -> dict[str, Any] | None:
    if found is None:
        return None
    items = [
        {**asdict(item), "mfu": [found.mfu_with(item, is_on) for is_on in (False, True)]}
        for item in found.items
    ]
    return {"device": found.device, "mfu": found.mfu, "shares": found.shares, "items": items}


def _cut(cut: CutReport) -> dict[str, Any]:
    return {
        "bounds": list(cut.bounds),
        "work": list(cut.work),
        "imbalance": cut.imbalance,
        "slower_than_best": cut.slower,
        "best_bounds": list(cut.best),
        "best_peak_bytes": cut.best_peak,
    }


def _prediction(prediction: Prediction, report: Report) -> dict[str, Any]:
    makespan = prediction.timeline.makespan
    tokens = report.tokens if report.request.rates.known else None
    return {
        "schedule": prediction.plan.name,
        "chunks": prediction.chunks,
        "makespan": makespan,
        "span": prediction.timeline.span,
        "bubble": prediction.timeline.bubble,
        "bubble_by_formula": prediction.bubble_formula,
        "tokens_per_second": tokens / makespan if tokens and makespan else None,
        "messages": prediction.messages,
        "message_bytes": prediction.message_bytes,
        "fits": prediction.fits(report.request.limit),
        "peak_bytes": prediction.peak,
        "memory": [
            {
                "rank": rank,
                "device": memory.device,
                **asdict(memory.footprint),
                "activations": memory.activations,
                "buffers": memory.buffers,
                "total": memory.total,
                "in_flight": memory.schedule_peak.in_flight,
                "activations_on_host": memory.schedule_peak.host,
                "activations_copied": memory.schedule_peak.moved,
            }
            for rank, memory in enumerate(prediction.memory)
        ],
    }


def report_panels(report: Report, *, only_marked: bool) -> tuple[list[Panel], str]:
    """Return a panel for each schedule, the configured one first, and the unit of memory.

    Args:
        only_marked: draw only the schedule of the config and the best alternative.
    """
    marks = _marks(report)
    others = [] if only_marked else [p for p in report.compared if p not in marks]
    predictions = [*marks, *others]
    name, size = unit_of([int(max(p.timeline.peak)) for p in predictions])
    panels = [_panel(p, size, marks.get(p)) for p in predictions]
    return panels, f"{name} of activations"


def _marks(report: Report) -> dict[Prediction, str | None]:
    """Return the schedule of the config, and the fastest other one, if possible one that fits.

    They are marked in tables and pictures if there was a comparison.
    """
    own = report.prediction
    if not report.compared:
        return {own: None}
    others = [other for other in report.compared if other is not own]
    fitting = [other for other in others if other.fits(report.request.limit) is not False]
    best = (fitting or others)[:1]
    return {own: "in the config", **dict.fromkeys(best, "best alternative")}


def _panel(prediction: Prediction, unit: int, mark: str | None) -> Panel:
    def scaled(sizes: Sequence[float]) -> tuple[float, ...]:
        return tuple(round(size / unit, 2) for size in sizes)

    costs = replace(
        prediction.costs,
        activation=scaled(prediction.costs.held_after_forward),
        kept=scaled(prediction.costs.held_after_input),
    )
    timeline = replace(prediction.timeline, peak=scaled(prediction.timeline.peak))
    return Panel(timeline, costs=costs, mark=mark)


def report_intro(report: Report, changes: Sequence[TriedChange], title: str) -> Intro:
    """Return the verdict, the memory of each rank, comparison and changes; details in tables."""
    summary = [*summary_rows(report).items(), *step_summary(report).items(), verdict(report)]
    tables = [_comparison(report)] if report.compared else []
    tables += [change_table(report, changes)] if changes else []
    return Intro(
        title=title,
        verdict=_verdict(report),
        bars=_memory(report),
        tables=tables,
        details=[
            Table("mesh, batch, model and step", ("", ""), summary),
            stage_table(report),
            memory_table(report),
        ],
    )


def _verdict(report: Report) -> Verdict:
    limit, prediction = report.request.limit, report.prediction
    need = show_bytes(prediction.peak)
    if limit is None:
        headline = f"Needs {need} of device memory"
    elif report.fits:
        headline = f"Fits: {need} of {show_bytes(limit)}"
    else:
        headline = f"Does not fit: needs {need} of {show_bytes(limit)}"
    facts = [
        ("schedule", prediction.plan.name),
        ("time per step", _time(prediction, report)),
        ("bubble", show_percent(prediction.timeline.bubble)),
        ("fullest rank", f"pipeline rank {prediction.fullest_rank}"),
    ]
    for other in [*_marks(report)][1:]:
        ratio = other.timeline.makespan / prediction.timeline.makespan
        text = f"{other.plan.name}: {_time(other, report)} ({percent(ratio - 1, signed=True)})"
        fits = {True: ", fits", False: ", does not fit", None: ""}[other.fits(limit)]
        facts.append(("best alternative", f"{text}, {show_bytes(other.peak)}{fits}"))
    remarks = [(f"{name} is not possible:", why) for name, why in report.refused.items()]
    remarks += [("note:", text) for text in report.notes]
    return Verdict(report.fits, headline, facts, remarks)


def _time(prediction: Prediction, report: Report) -> str:
    makespan = prediction.timeline.makespan
    if report.request.rates.known:
        return show_time(makespan)
    return f"{three(makespan)} mean forwards of a rank"


def _memory(report: Report) -> Bars:
    memory, limit = report.prediction.memory, report.request.limit
    name, unit = unit_of([rank.total for rank in memory])
    return Bars(
        title="memory of each pipeline rank",
        unit=name,
        parts=tuple(memory[0].parts),
        rows=[
            (f"rank {number}", [size / unit for size in rank.parts.values()])
            for number, rank in enumerate(memory)
        ],
        limit=None if limit is None else limit / unit,
        limit_name="device",
    )


def _comparison(report: Report) -> Table:
    """Return the table of compared schedules; words mark those that the timelines mark."""
    table, marks = comparison_table(report), _marks(report)
    words = [marks.get(prediction) or "" for prediction in report.compared]
    rows = [(*row[1:], word) for row, word in zip(table.rows, words, strict=True)]
    marked = [number for number, word in enumerate(words) if word]
    return Table("schedules", (*table.header[1:], ""), rows, marked)
