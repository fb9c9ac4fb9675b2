"""The result of the check as text and as JSON values."""

from collections.abc import Iterator
from typing import Any

import torch

from pipemega.hf.installed_transformers import import_transformers
from pipemega.hf_check.comparison import TOLERANCE, Difference, GradientComparison
from pipemega.hf_check.model_check import CheckResult
from pipemega.hf_check.shrink import Change
from pipemega.hf_check.split_run import SplitSettings

# Unequal parameters that are listed for each batch.
_LISTED = 5


def report(result: CheckResult, split: SplitSettings) -> Iterator[str]:
    """Yield the lines of the page; the last one is the verdict."""
    versions = f"transformers {import_transformers().__version__}, torch {torch.__version__}"
    yield f"model     {result.class_name}, {_number(result.parameters)} parameters; {versions}"
    yield f"split     {_described(split)}"
    yield f"compared  a model of {_number(result.small_parameters)} parameters, in float64, with:"
    for change in result.changes:
        yield f"            {_change(change)}"
    for comparison in result.comparisons:
        yield from _comparison(comparison)
    for kind, message in result.refused.items():
        yield f"{kind:<8}  refused: {message}"
    yield ""
    yield _verdict(result, split)


def _verdict(result: CheckResult, split: SplitSettings) -> str:
    if result.is_equal:
        return (
            f"equal: on {_described(split)} the loss and every gradient are those of transformers' "
            f"model"
        )
    names = {d.name: d for c in result.comparisons for d in c.unequal}
    if names:
        return (
            f"DIFFERENT: {len(names)} gradients are not those of transformers' model, the first: "
            f"{next(iter(names))}. Do not train this model with {_described(split)}"
        )
    return f"DIFFERENT: the loss is not that of transformers' model on {_described(split)}"


def _described(split: SplitSettings) -> str:
    sequence = ", sequence parallel" if split.sequence_parallel else ""
    sizes = f"pipeline {split.pipeline} x tensor {split.tensor}"
    return f"{sizes}, schedule {split.schedule}{sequence}"


def _comparison(comparison: GradientComparison) -> Iterator[str]:
    first = comparison.differences[0]
    loss = f"loss {comparison.loss:.12f}, difference {comparison.loss_difference:.0e}"
    gradients = f"{len(comparison.differences)} gradients"
    yield f"{comparison.kind:<8}  {loss}; {gradients}, largest difference {first.relative:.0e}"
    unequal = comparison.unequal
    for difference in unequal[:_LISTED]:
        yield f"            {_difference(difference)}"
    if len(unequal) > _LISTED:
        yield f"            and {len(unequal) - _LISTED} more"


def _difference(difference: Difference) -> str:
    if difference.why:
        return f"{difference.name}: {difference.why}"
    return f"{difference.name}: {difference.relative:.1e} of its largest value"


def _change(change: Change) -> str:
    return f"{change.key} {_short(change.old)} -> {_short(change.new)}"


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"({len(value)} values)"
    return "(changed)" if isinstance(value, dict) else str(value)


def _number(parameters: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters:,}"


def values(result: CheckResult, split: SplitSettings) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "model": result.class_name,
        "parameters": result.parameters,
        "compared_parameters": result.small_parameters,
        "transformers": import_transformers().__version__,
        "torch": torch.__version__,
        "pipeline": split.pipeline,
        "tensor": split.tensor,
        "schedule": split.schedule,
        "sequence_parallel": split.sequence_parallel,
        "tolerance": TOLERANCE,
        "equal": result.is_equal,
        "changes": {c.key: [c.old, c.new] for c in result.changes},
        "refused": result.refused,
        "batches": [
            {
                "kind": c.kind,
                "loss": c.loss,
                "transformers_loss": c.reference_loss,
                "loss_difference": c.loss_difference,
                "gradients": len(c.differences),
                "largest_difference": c.differences[0].relative,
                "unequal": {d.name: d.relative for d in c.unequal},
            }
            for c in result.comparisons
        ],
    }
