"""Speed, memory and fp16 overflow recovery of a GPT with 1.3 B parameters on one GPU.

    python -m benchmarks.gpu_single.run --json result.json         from the root of the repository
    python -m benchmarks.gpu_single.run --device cpu --tiny        a test of the script

Trains with `pipemega.initialize` on mock data in bf16 with each recompute mode, then with each
throughput item alone and with all of them (docs/gpu.md), then in fp16 from a loss scale that is too
high. The exit status is 1 if the losses of two rows differ, if fp16 does not recover, or if a
skipped step changes a weight.
"""

import argparse
import gc
import importlib.util
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import pipemega
from benchmarks.gpu_single.estimate import MODES, Recompute, Sizes, estimate
from benchmarks.gpu_single.machine import (
    attention_kernel,
    data_sheet_tflops,
    describe_machine,
    matrix_tflops,
    seconds_of,
)
from benchmarks.gpu_single.report import markdown
from pipemega import Engine
from pipemega.data.tokens.generated_data import MockDataset
from pipemega.data.tokens.gpt_dataset import SampleFormat
from pipemega.kernels import Kernels
from pipemega.layer_costs.tensor_meter import TensorMeter
from pipemega.models import GPTConfig, gpt
from pipemega.monitor import gpt_flops_per_token
from pipemega.planning import estimate as planning
from pipemega.planning.throughput import efficiency

TINY = Sizes(hidden=32, layers=2, heads=2, seq=32, vocab=256, micro_batch=2, num_microbatches=2)

# Relative, of the losses: the backward of fused attention has no fixed order of additions, and the
# rounding differences add up over steps.
LOSS_TOLERANCE = 5e-3

# Without the throughput items that are on by default on GPUs.
PLAIN: dict[str, Any] = {"compile": {"enabled": False}, "gradient_accumulation_fusion": False}
_STORED = {"model": {"recompute": "full"}, "pipeline": {"schedule": "gpipe"}}
# Name of a row -> its changes of `PLAIN`.
ITEMS: dict[str, dict[str, Any]] = {
    "compiled layers": {"compile": {"enabled": True}},
    "fused weight gradients": {"gradient_accumulation_fusion": True},
    "both": {"compile": {"enabled": True}, "gradient_accumulation_fusion": True},
    "CUDA graphs": {"compile": {"enabled": False, "cuda_graphs": True}},
    "selective, linears kept": {"model": {"recompute": "selective", "recompute_keep": ["linear"]}},
    "full, gpipe": _STORED,
    "full, gpipe, activations on the host": {
        **_STORED,
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    "fp8 linears": {"fp8": {"enabled": True}, "compile": {"enabled": True}},
    "packed documents, mask": {"model": {"document_attention": "mask"}},
    "packed documents, blocks": {"model": {"document_attention": "auto"}},
}
DOCUMENTS = 8  # in each sample of the rows with packed documents

# A loss scale of 2 to this power overflows fp16 in the gradient of the logits.
SCALE_POWER = 32
MAX_OVERFLOW_STEPS = 40
GOOD_STEPS = 5  # consecutive steps without overflow after which fp16 has recovered


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no CUDA device; use --device cpu --tiny to test the script")
        return 2
    sizes = TINY if options.tiny else Sizes()
    sizes = replace(
        sizes,
        micro_batch=options.micro_batch or sizes.micro_batch,
        num_microbatches=options.accumulate or sizes.num_microbatches,
    )
    arguments = sys.argv[1:] if argv is None else argv
    matrix = 128 if options.tiny else 8192
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu_single.run", *arguments]),
        "machine": describe_machine(device),
        "sizes": asdict(sizes) | {"parameters": sizes.parameters, "tokens_per_step": sizes.tokens},
        "options": {"steps": options.steps, "warmup": options.warmup, "matrix": matrix},
        "attention": attention_kernel(sizes, device),
        "peak_tflops": {
            "measured": matrix_tflops(device, matrix),
            "data_sheet": data_sheet_tflops(device),
        },
    }
    report |= {"rows": [], "overflow": {"error": "not run"}, "faults": ["not at its end"]}

    def write() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    runs: list[tuple[str, Recompute, dict[str, Any]]] = [(m, m, {}) for m in options.recompute]
    runs += [(name, "none", changes) for name, changes in ITEMS.items() if options.items]
    for name, mode, changes in runs:
        if "fp8" in changes and importlib.util.find_spec("torchao") is None:
            continue
        packed = name.startswith("packed")
        work = partial(
            _row, sizes, mode, PLAIN | changes, packed, options, device, report["peak_tflops"]
        )
        report["rows"].append(_attempt(name, work))
        write()
    report["overflow"] = _attempt("fp16", partial(overflow, sizes, device))
    report["faults"] = _faults(report)
    write()
    print(markdown(report))
    return 1 if report["faults"] else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; the median is reported")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed steps")
    parser.add_argument("--micro-batch", type=int, help="samples per micro-batch (default: 8)")
    parser.add_argument("--accumulate", type=int, help="micro-batches per step (default: 4)")
    parser.add_argument("--recompute", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--items",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also run each throughput item alone (default: on a GPU)",
    )
    parser.add_argument("--json", type=Path, help="write the full result to this file")
    options = parser.parse_args(argv)
    if options.items is None:
        options.items = options.device == "cuda"
    return options


def _attempt(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of `work` with its name, or its error; the other rows still run."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    # Frees the previous engine, which has reference cycles through parameter hooks.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return {"name": name, "error": None, **work()}
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        is_memory = isinstance(cause, torch.OutOfMemoryError)
        if not is_memory:
            traceback.print_exc()
        kind = "out of memory" if is_memory else type(cause).__name__
        return {"name": name, "error": f"{kind}: {str(cause).partition(chr(10))[0]}"}


def config_of(
    sizes: Sizes,
    recompute: Recompute,
    device: torch.device,
    *,
    model: Mapping[str, Any] | None = None,
    **sections: Any,
) -> pipemega.Config:
    """Return the config of a run without dropout; `sections`: precision, throughput items."""
    return pipemega.load_config(
        {
            "train_micro_batch_size_per_gpu": sizes.micro_batch,
            "gradient_accumulation_steps": sizes.num_microbatches,
            "steps_per_print": None,
            "mesh": {"device": device.type},
            "model": {
                "num_layers": sizes.layers,
                "hidden_size": sizes.hidden,
                "num_attention_heads": sizes.heads,
                "seq_length": sizes.seq,
                "vocab_size": sizes.vocab,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "recompute": recompute,
                **(model or {}),
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
            **sections,
        }
    )


class PackedSamples(Dataset[Any]):
    """Mock samples of several documents."""

    already_shuffled = deterministic = True

    def __init__(self, samples: MockDataset) -> None:
        self._samples, length = samples, samples.format.seq_length
        self._positions = torch.arange(length) % (length // DOCUMENTS)
        self.fingerprint = f"{samples.fingerprint}, {DOCUMENTS} documents"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        tokens, labels = self._samples[index]
        return {"input_ids": tokens, "position_ids": self._positions}, labels


def build(
    sizes: Sizes,
    recompute: Recompute,
    device: torch.device,
    packed: bool = False,
    **sections: Any,
) -> Engine:
    """Build an engine with mock data and without dropout."""
    config = config_of(sizes, recompute, device, **sections)
    mesh = pipemega.build_mesh(config)
    model = gpt(GPTConfig.of(config, sizes.vocab), Kernels.detect(mesh.device))
    samples = MockDataset("train", SampleFormat(sizes.seq, sizes.vocab), None, config.seed)
    data = PackedSamples(samples) if packed else samples
    engine, *_ = pipemega.initialize(model, config, data, mesh=mesh)
    return engine


def _planned(
    sizes: Sizes, recompute: Recompute, sections: Mapping[str, Any], device: torch.device
) -> tuple[int, float | None]:
    """Return the peak memory and the MFU that `pipemega plan` predicts."""
    config = config_of(sizes, recompute, device, bf16={"enabled": True}, **sections)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    report = planning.estimate(planning.Request(config, device_name=name))
    found = efficiency(report)
    return report.prediction.peak, None if found is None else found.mfu


def _counted_bytes(
    sizes: Sizes, recompute: Recompute, sections: Mapping[str, Any], device: torch.device
) -> int:
    """Return the peak of all tensors of two steps, where no allocator of a GPU measures it."""
    with TensorMeter() as meter:
        engine = build(sizes, recompute, device, bf16={"enabled": True}, **sections)
        for _ in range(2):
            engine.train_batch()
    _close(engine)
    return meter.peak


def _row(
    sizes: Sizes,
    recompute: Recompute,
    sections: Mapping[str, Any],
    packed: bool,
    options: argparse.Namespace,
    device: torch.device,
    peaks: dict[str, float | None],
) -> dict[str, Any]:
    """Measure times, losses and memory of one recompute mode and set of throughput items."""
    is_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if is_cuda else None
    engine = build(sizes, recompute, device, packed, bf16={"enabled": True}, **sections)
    losses = [engine.train_batch() for _ in range(options.warmup)]
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [
        seconds_of(lambda: losses.append(engine.train_batch()), device)
        for _ in range(options.steps)
    ]
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else None
    planned, planned_mfu = _planned(sizes, recompute, sections, device)
    # Parts are timed in a separate step: the host then waits for the device at its end.
    engine.timers.enabled = True
    losses.append(engine.train_batch())
    parts = engine.timers.lap()
    _close(engine)
    if peak is None:
        peak = _counted_bytes(sizes, recompute, sections, device)
    flops = sizes.tokens * gpt_flops_per_token(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=4 * sizes.hidden,
        seq_length=sizes.seq,
        vocab_size=sizes.vocab,
    )
    tflops = flops / median(seconds) / 1e12
    return {
        "step_seconds": median(seconds),
        "all_seconds": seconds,
        "tokens_per_second": sizes.tokens / median(seconds),
        "tflops": tflops,
        "mfu": {name: tflops / value if value else None for name, value in peaks.items()},
        "peak_bytes": peak,
        "bytes_before": before,
        "estimate_bytes": estimate(sizes, recompute),
        "planned_bytes": planned,
        "planned_mfu": planned_mfu,
        "packed": packed,
        "part_seconds": parts,
        "losses": losses,
    }


def overflow(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Train in fp16 from a loss scale of 2^32; record whether skipped steps change weights."""
    fp16 = {"enabled": True, "initial_scale_power": SCALE_POWER, "hysteresis": 1}
    engine = build(sizes, "none", device, fp16=fp16)
    steps: list[dict[str, Any]] = []
    while len(steps) < MAX_OVERFLOW_STEPS and not _recovered(steps):
        before = [tensor.clone() for tensor in _weights(engine)]
        engine.train_batch()
        report = engine.last_step
        assert report is not None
        pairs = zip(before, _weights(engine), strict=True)
        steps.append(
            {
                "loss": report.loss,
                "loss_scale": report.loss_scale,
                "grad_norm": report.grad_norm,
                "skipped": report.skipped,
                "unchanged": all(torch.equal(old, new) for old, new in pairs),
            }
        )
    _close(engine)
    return {"steps": steps, "skipped": engine.skipped_steps, "recovered": _recovered(steps)}


def _weights(engine: Engine) -> list[Tensor]:
    """Return the model weights and the master weights."""
    assert engine.optimizer is not None
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    return [p.detach() for p in (*engine.module.parameters(), *masters)]


def _recovered(steps: list[dict[str, Any]]) -> bool:
    last = steps[-GOOD_STEPS:]
    return len(last) == GOOD_STEPS and not any(step["skipped"] for step in last)


def _close(engine: Engine) -> None:
    assert engine.loader is not None
    engine.loader.close()


def _faults(report: dict[str, Any]) -> list[str]:
    """Return the reasons why the run failed; empty if it succeeded."""
    faults = [f"{r['name']}: {r['error']}" for r in report["rows"] if r["error"]]
    rows = [row for row in report["rows"] if not row["error"]]
    for packed in (False, True):
        alike = [r for r in rows if r["packed"] is packed and not r["name"].startswith("fp8")]
        first, *others = alike or [None]
        for row in others:
            pairs = zip(first["losses"], row["losses"], strict=True)
            worst = max(abs(a - b) / abs(a) for a, b in pairs)
            if not worst <= LOSS_TOLERANCE:
                faults.append(f"losses of {row['name']} and {first['name']} differ by {worst:.1e}")
    fp16 = report["overflow"]
    if fp16["error"]:
        return [*faults, f"fp16: {fp16['error']}"]
    if not fp16["recovered"] or not fp16["skipped"]:
        faults.append(f"fp16 skipped {fp16['skipped']} steps and did not overflow and recover")
    if not all(step["unchanged"] for step in fp16["steps"] if step["skipped"]):
        faults.append("a skipped step changed a weight")
    return faults


if __name__ == "__main__":
    raise SystemExit(main())
