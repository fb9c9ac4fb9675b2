"""The commands of the benchmarks run to their end, with their shortest options."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Module, its options, and words of the result that it prints.
COMMANDS = [
    (
        "bubble.run",
        "--ranks 4 --microbatches 8 --costs 1,1,1 --rounds 1 --systems pipemega:zb-v torch:1f1b",
        "| torch:1f1b |",
    ),
    ("checkpoint.run", "--width 64 --layers 2 --rounds 1", "| pipeline 1 x data 2 |"),
    ("checkpoint.bandwidth", "--megabytes 10 --rounds 1", "| torch.load: load |"),
    ("compile.run", "--rounds 1", "gradients are equal up to rounding: pass"),
    (
        "executor_overhead.run",
        "--rounds 1 --microbatches 4 --schedules 1f1b zb-v --baseline .",
        "| linear | zb-v |",
    ),
    ("head.run", "--rounds 1", "fused / logits"),
    ("hf_adapter.run", "--hidden 128 --layers 2 --vocab 256 --length 32 --rounds 1", "tokens/s"),
    ("loader.run", "--tokens 100000 --samples 100 --rounds 1", "Megatron's reads"),
    ("memory.run", "--ranks 2 --dtypes fp32", "| pipemega:2x1@auto |"),
    ("optimizer_sync.run", "--microbatches 4 --steps 1 --rounds 1", "| zb-v |"),
    ("pipeline_cpu.run", "--rounds 1 --systems torch:1f1b pipemega:auto", "| pipemega:auto |"),
    ("scale.run", "", "pass"),
    ("split_backward.run", "", "bitwise equal"),
    ("startup.run", "--rounds 1 --check-rounds 1 --baseline .", "| total |"),
    (
        "trace_overhead.run",
        "--pairs 1 --hidden 64 --schedules 1f1b",
        "| 1f1b, memory | 64 |",
    ),
    ("vocabulary.run", "--rounds 1 --case sleeping", "best cut / parallel"),
    ("zero_bubble.run", "--rounds 1 --layouts PP", "| PP | zb-v |"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("module", "options", "words"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_a_benchmark_prints_its_result(module: str, options: str, words: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}", *options.split()]
    if module == "trace_overhead.run":
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command[2:2] = [*launcher, "-m"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    # A benchmark returns 1 if a goal is missed; such short runs miss some.
    assert words in done.stdout, done.stdout + done.stderr
