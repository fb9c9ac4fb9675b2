"""Formats the result of a run: the table and the goals."""

from typing import Any

# Ratio and its goal.
GOALS = (
    ("pipemega:1f1b over pipemega:1f1b@hand-cut", 0.98),
    ("pipemega:auto over pipemega:1f1b@hand-cut", 1.03),
    ("own:1f1b over own:1f1b@hand-cut", 0.98),
    ("own:auto over own:1f1b@hand-cut", 1.03),
    ("pipemega:auto@zb-h2-bytes over torch:1f1b", 1.10),
    ("best of pipemega over the fastest of torch", 1.03),
    ("best of pipemega over torch:1f1b", 1.10),
    ("best of pipemega over the limit", 0.97),
    ("pipemega:zb-h1 over pipemega:1f1b@hand-cut", 1.08),
)


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (name, measured ratio, goal) for the systems in this run.

    The best of pipemega is the fastest whose ranks all need at most the memory of the fullest rank
    of torch:1f1b. Ratios are medians of the ratios within a round.
    """
    by_name = {row["system"]: row for row in rows}
    peer = by_name.get("torch:1f1b")
    theirs = [row for row in rows if row["system"].startswith("torch:")]
    ours = [row for row in rows if row["system"].startswith("pipemega:")]
    allowed = [row for row in ours if peer and max(row["live_mb"]) <= max(peer["live_mb"])]
    values: dict[str, float | None] = {}
    ratios = {"torch:1f1b": "over_torch_1f1b", "pipemega:1f1b@hand-cut": "over_own_1f1b"}
    for what, _ in GOALS:
        system, _, other = what.partition(" over ")
        if system.startswith("own:") and system in by_name:
            values[what] = by_name[system]["over_hand_cut"]
        if system in by_name and other in ratios:
            values[what] = by_name[system][ratios[other]]
    if allowed and peer:
        best = max(allowed, key=lambda row: float(row["tokens_per_second"]))
        fastest = max(theirs, key=lambda row: float(row["tokens_per_second"]))
        values["best of pipemega over torch:1f1b"] = best["over_torch_1f1b"]
        values["best of pipemega over the limit"] = best["over_limit"]
        values["best of pipemega over the fastest of torch"] = (
            best["over_torch_1f1b"] / fastest["over_torch_1f1b"]
        )
    return [(name, value, goal) for name, goal in GOALS if (value := values.get(name))]


def markdown(report: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    machine, sizes, rows = report["machine"], report["sizes"], report["rows"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}; one thread a process, gloo, "
        f"hand cut: {report['options']['split']} of {sizes['layers']} blocks on the first of two "
        f"stages; "
        f"medians of {report['options']['rounds']} rounds, each with {report['options']['steps']} "
        f"step(s) of every system.",
        "",
        "| system | tokens/s | slowest, fastest | of the limit | × torch:1f1b "
        "| × own 1f1b@hand-cut (half of the rounds) "
        "| live tensors, MB per rank | resident growth, MB per rank | loss − reference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['system']} | {row['tokens_per_second']:.0f} "
            f"| {row['slowest']:.0f}, {row['fastest']:.0f} "
            f"| {_ratio(row['over_limit'])} | {_ratio(row['over_torch_1f1b'])} "
            f"| {_ratio(row['over_hand_cut'])}{_interval(row['interval_over_hand_cut'])} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['live_mb'])} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['rss_growth_mb'])} "
            f"| {row['loss_difference']:.1e} |"
        )
    lines += [""]
    lines += [
        f"- {what}: {value:.3f}, goal {goal:.2f}: {'reached' if value >= goal else 'missed'}"
        for what, value, goal in goals(rows)
    ]
    lines += [*(f"- {note}" for note in report["notes"]), "", f"`{report['command']}`"]
    return "\n".join(lines)


def _interval(quartiles: list[float]) -> str:
    return f" ({', '.join(f'{q:.2f}' for q in quartiles)})" if quartiles else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
