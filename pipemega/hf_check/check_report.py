"""The result of the check as text and as JSON values.

`pipemega hf table`: what works for each family, found by running it.

Each cell is a comparison of loss and every gradient with transformers' own model (`check_model`),
with the default config of the family, shrunk.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.engine.initialize import initialize
from pipemega.errors import ConfigError, PipemegaError
from pipemega.hf.hf_module import from_pretrained
from pipemega.hf.placeholders import import_transformers
from pipemega.hf.weights.checkpoint_model import export_checkpoint
from pipemega.hf_check.model_check import (
    TOLERANCE,
    CheckResult,
    Difference,
    GradientComparison,
    check_model,
    small_model,
)
from pipemega.hf_check.shrink import Change, Needs
from pipemega.hf_check.split_run import RunRanks, SplitSettings, float64_by_default

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
    if split.expert > 1:
        sizes += f" x expert {split.expert}"
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
        "expert": split.expert,
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


# Title -> model_type of transformers, and changes of its default config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {}),
    "Mixtral": ("mixtral", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Gemma2": ("gemma2", {}),
    "Gemma3 (text)": ("gemma3_text", {}),
    "Cohere (Command)": ("cohere", {}),
    "OLMo2": ("olmo2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "Phi3": ("phi3", {}),
    "GLM4": ("glm4", {}),
    "DeepSeek-V2": ("deepseek_v2", {"num_experts_per_tok": 2, "n_routed_experts": 8,
                                    "moe_intermediate_size": 1408}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "GPT2": ("gpt2", {}),
    "GPT-J": ("gptj", {}),
    "Bloom": ("bloom", {}),
    "Falcon (groups)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8,
                                   "num_attention_heads": 64, "hidden_size": 4096}),
    "Falcon-7B": ("falcon", {}),
    "OPT": ("opt", {}),
    "Bert": ("bert", {"architectures": ["BertForMaskedLM"]}),
    "T5": ("t5", {}),
    "Whisper": ("whisper", {"architectures": ["WhisperForConditionalGeneration"]}),
    "ViT": ("vit", {"architectures": ["ViTForImageClassification"]}),
    "Blip2": ("blip-2", {"image_token_index": 50265}),
    "SAM": ("sam", {}),
}  # fmt: skip
COLUMNS = (
    "family", "pipeline", "tensor", "sequence parallel", "zero bubble", "packed documents",
    "import", "export",
)  # fmt: skip


def table(titles: list[str], run_ranks: RunRanks | None = None) -> Iterator[str]:
    """Yield the lines of the table as Markdown, then the reasons of what does not work.

    Args:
        titles: keys of FAMILIES.
        run_ranks: see `check_model`.
    """
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{' --- |' * len(COLUMNS)}"
    reasons: dict[str, int] = {}
    for title in titles:
        cells = [_cell(text, reasons) for text in _results(title, run_ranks)]
        yield f"| {' | '.join([title, *cells])} |"
    yield ""
    for reason, number in reasons.items():
        yield f"{number}. {reason}"


def _cell(text: str, reasons: dict[str, int]) -> str:
    if text in ("yes", ""):
        return text or "–"
    return f"no ({reasons.setdefault(text, len(reasons) + 1)})"


def _results(title: str, run_ranks: RunRanks | None) -> list[str]:
    """Return the cells of a family: "yes", "" if the column does not apply, or the reason."""
    family, changes = FAMILIES[title]
    config = import_transformers().AutoConfig.for_model(family, **changes)

    def check(**settings: Any) -> CheckResult | str:
        try:
            return check_model(config, SplitSettings(**settings), run_ranks)
        except PipemegaError as error:
            return _reason(error)

    pipeline = check(pipeline=2)
    cells = [_family_verdict(pipeline)]
    cells.append(_family_verdict(check(pipeline=1, tensor=2)))
    cells.append(_family_verdict(check(pipeline=1, tensor=2, sequence_parallel=True)))
    cells.append(_family_verdict(check(pipeline=2, schedule="zb-v")))
    cells.append(_packed(pipeline))
    # The ranks of the check have read their shards from safetensors.
    cells.append(cells[0])
    cells.append(_export(config))
    return cells


def _family_verdict(result: CheckResult | str) -> str:
    if isinstance(result, str):
        return result
    if all(c.is_equal for c in result.comparisons if c.kind != "packed"):
        return "yes"
    return "the gradients differ from transformers'"


def _packed(result: CheckResult | str) -> str:
    if isinstance(result, str):
        return result
    if "packed" in result.refused:
        return "the masks of transformers do not follow position_ids that restart"
    packed = [c for c in result.comparisons if c.kind == "packed"]
    if not packed:
        return ""
    return "yes" if packed[0].is_equal else "the gradients differ from transformers'"


def _reason(error: BaseException) -> str:
    """Return the message without the numbers and the advice of one config."""
    text = " ".join(str(error).split()).split(": use mesh")[0].split("; set ")[0]
    return text.replace("mesh.sequence_parallel does not work for the family ", "")


def _export(config: Any) -> str:
    """Save a checkpoint of one rank, export it, and compare all tensors with those imported."""
    try:
        before, after = export_round_trip(config)
    except PipemegaError as error:
        return _reason(error)
    same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return "yes" if same else "the exported tensors differ"


def export_round_trip(config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a small model before import and after export, by HF's names."""
    full = from_pretrained(config, pretrained=False)
    model, _ = small_model(full.description.config, type(full.description.model), Needs())
    with tempfile.TemporaryDirectory() as folder:
        source, saved, exported = (str(Path(folder, name)) for name in ("in", "run", "out"))
        model.save_pretrained(source)
        settings = SplitSettings(pipeline=1, num_microbatches=1, folder=source)
        with float64_by_default():
            _save(settings, saved)
        export_checkpoint(saved, exported, dtype=torch.float64)
        again = type(model).from_pretrained(exported, dtype=torch.float64)
        return dict(model.state_dict()), dict(again.state_dict())


def _save(settings: SplitSettings, folder: str) -> None:
    net = from_pretrained(settings.folder)
    config = {**settings.config(1), "checkpoint": {"async": False}}
    engine, *_ = initialize(net, config)
    engine.save_checkpoint(folder)
    engine.close()


def titles_of(names: list[str]) -> list[str]:
    """Return the titles that are named; all if none is.

    Raises:
        ConfigError: there is no such title.
    """
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"unknown family {unknown[0]!r}; the table has: {', '.join(FAMILIES)}")
    return names or list(FAMILIES)
