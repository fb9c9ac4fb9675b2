"""What a training process imports before its first step."""

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.paper.test_imports import LEAVES

ROOT = Path(__file__).parents[2]
# Each takes 0.05 to 0.5 s, and an ordinary run needs none of them before its first step.
NOT_IMPORTED = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "transformers",
    "peft",
    "safetensors",
    "wandb",
    "tensorboard",
    "matplotlib",
    "pandas",
    "pipemega.checkpoint.dcp_storage",
    "pipemega.data.finetuning.finetuning_dataset",
    "pipemega.pipeline.visualize",
)
# A step with gradient clipping and AdamW, on one pipeline rank.
STEP = f"""
import gc, sys
import pipemega
from pipemega import pretrain
assert "torch" in sys.modules and gc.isenabled() and gc.get_freeze_count() > 100_000
import torch
from pipemega import LayerSpec, PipelineModule
layers = [LayerSpec(torch.nn.Linear, 2, 2), LayerSpec(torch.nn.Linear, 2, 2)]
engine, *_ = pipemega.initialize(
    PipelineModule(layers, torch.nn.functional.mse_loss),
    {{
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}},
        "mesh": {{"device": "cpu"}},
    }},
)
engine.train_batch(batch=(torch.ones(4, 2), torch.zeros(4, 2)))
assert type(engine.optimizer).step is not None and engine.global_steps == 1
print([name for name in {NOT_IMPORTED} if name in sys.modules])
"""

# The first step on two pipeline ranks: rank 0 counts the layers, and the stages move.
PIPELINE = """
import sys
import pipemega, torch
from pipemega import LayerSpec, PipelineModule
sizes = (512, 512, 512, 512, 2)
layers = [LayerSpec(torch.nn.Linear, *pair) for pair in zip(sizes, sizes[1:])]
engine, *_ = pipemega.initialize(
    PipelineModule(layers, torch.nn.functional.mse_loss),
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "pipeline": {"schedule": "1f1b"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "mesh": {"pipeline": 2, "device": "cpu"},
    },
)
engine.train_batch(batch=(torch.ones(4, 512), torch.zeros(4, 2)))
print(sorted(name for name in sys.modules if name.startswith("pipemega.")))
"""

# The cut of a GPT by time, on the meta device.
COUNT = """
import sys
import torch
from pipemega.config import load
from pipemega.planning.estimate import Request, estimate
estimate(Request(load({
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "mesh": {"pipeline": 2, "device": "cpu"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "model": {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8,
        "vocab_size": 16,
    },
})))
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
torch._refs.ge(torch.ones(1, device="meta"), 0)
print("torch._dynamo" in sys.modules)
"""


def output_of(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_a_run_imports_no_compiler_and_no_checkpoint_format_before_its_first_step() -> None:
    assert output_of(STEP).splitlines()[-1] == "[]"


def test_a_plain_pipeline_counts_and_cuts_its_layers_without_the_planner() -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PIPELINE],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        loaded = ast.literal_eval(output.splitlines()[-1])
        assert "pipemega.layer_costs.counted_model" in loaded
        leaves = {f"pipemega.{leaf.replace('/', '.')}" for leaf in LEAVES}
        assert [name for name in loaded if name.startswith(tuple(leaves))] == []


def test_layers_are_counted_without_a_compiler_which_torch_still_imports_afterwards() -> None:
    assert output_of(COUNT) == "[]\nTrue"


def test_pipemega_check_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from pipemega.cli import main; main(['check', 'configs/quickstart.json'])\n"
        "print([n for n in ('torch', 'numpy', 'tokenizers', 'tqdm') if n in sys.modules])"
    )
    assert output_of(code).splitlines()[-1] == "[]"
