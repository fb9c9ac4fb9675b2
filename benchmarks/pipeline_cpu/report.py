"""The result of a run as a page: the table, and the marks that it is held against."""

from typing import Any

# What is compared, and the least that it should be.
MARKS = (
    ("best of pipemega over the fastest of torch", 1.03),
    ("best of pipemega over torch:1f1b", 1.10),
    ("best of pipemega over the limit", 0.97),
    ("pipemega:zb-h1 over pipemega:1f1b", 1.08),
)


def marks(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured, wanted), of what this run can say.

    The best of pipemega is the fastest that holds no more on any rank than torch:1f1b on its
    fullest. Ratios are medians of the ratios within a round.
    """
    by_name = {row["system"]: row for row in rows}
    peer = by_name.get("torch:1f1b")
    theirs = [row for row in rows if row["system"].startswith("torch:")]
    ours = [row for row in rows if row["system"].startswith("pipemega:")]
    allowed = [row for row in ours if peer and max(row["live_mb"]) <= max(peer["live_mb"])]
    values: dict[str, float | None] = {}
    if allowed and peer:
        best = max(allowed, key=lambda row: float(row["tokens_per_second"]))
        fastest = max(theirs, key=lambda row: float(row["tokens_per_second"]))
        values[MARKS[0][0]] = best["over_torch_1f1b"] / fastest["over_torch_1f1b"]
        values[MARKS[1][0]] = best["over_torch_1f1b"]
        values[MARKS[2][0]] = best["over_limit"]
    if "pipemega:zb-h1" in by_name:
        values[MARKS[3][0]] = by_name["pipemega:zb-h1"]["over_own_1f1b"]
    return [(name, value, wanted) for name, wanted in MARKS if (value := values.get(name))]


def markdown(report: dict[str, Any]) -> str:
    """For the terminal and for the README."""
    machine, sizes, rows = report["machine"], report["sizes"], report["rows"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}; one thread a process, gloo, "
        f"{report['options']['split']} of {sizes['layers']} blocks on the first of two stages; "
        f"median of {report['options']['rounds']} rounds of {report['options']['steps']} steps.",
        "",
        "| system | tokens/s | rounds | of the limit | × torch:1f1b | live tensors, MB per rank "
        "| resident growth, MB per rank | loss − reference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['system']} | {row['tokens_per_second']:.0f} "
            f"| {', '.join(f'{rate:.0f}' for rate in row['rounds'])} "
            f"| {_ratio(row['over_limit'])} | {_ratio(row['over_torch_1f1b'])} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['live_mb'])} "
            f"| {', '.join(f'{mb:.0f}' for mb in row['rss_growth_mb'])} "
            f"| {row['loss_difference']:.1e} |"
        )
    lines += [""]
    lines += [
        f"- {what}: {value:.3f}, wanted {wanted:.2f}: {'yes' if value >= wanted else 'no'}"
        for what, value, wanted in marks(rows)
    ]
    lines += [*(f"- {note}" for note in report["notes"]), "", f"`{report['command']}`"]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
