"""Peak memory and time of loading a Hugging Face folder onto a mesh, and of an export.

    python -m benchmarks.hf_weights.run            from the root of the repository

CPU ranks of one thread each. Writes a Llama and a Mixtral with random bf16 weights into a temporary
folder, loads each on several meshes, and exports a checkpoint of it in one process. "peak" is the
largest resident memory (VmHWM) above that before loading; pages of the files count too.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.ranks import machine, measure

# pipeline, tensor
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def models() -> dict[str, Any]:
    llama = transformers.LlamaConfig(**SIZES, num_hidden_layers=12, intermediate_size=5632)
    mixtral = transformers.MixtralConfig(
        **SIZES, num_hidden_layers=3, intermediate_size=5632, num_local_experts=8
    )
    return {"Llama": llama, "Mixtral": mixtral}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | mesh | read | shard | peak | peak / (1.15 shard + tensor) | seconds |")
    print("| --- | --- |" + " ---: |" * 5)
    for name, config in models().items():
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            measure_model(name, config, Path(work))


def measure_model(name: str, config: Any, work: Path) -> None:
    folder = work / "source"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")
    largest = max(p.numel() for p in model.parameters()) * 2 / 1e6
    del model
    for pipeline, tensor in MESHES:
        arguments = ["--mode", "load", "--folder", str(folder)]
        arguments += ["--pipeline", str(pipeline), "--tensor", str(tensor)]
        ranks = measure("benchmarks.hf_weights.worker", pipeline * tensor, arguments)
        worst = max(ranks, key=lambda rank: rank["peak"] / (1.15 * rank["shard"] + largest))
        limit = 1.15 * worst["shard"] + largest
        print(
            f"| {name} | pipeline {pipeline} x tensor {tensor} | {worst['read']:.0f} | "
            f"{worst['shard']:.0f} | {worst['peak']:.0f} | {worst['peak'] / limit:.2f} | "
            f"{max(rank['seconds'] for rank in ranks):.1f} |",
            flush=True,
        )
    arguments = ["--folder", str(folder), "--work", str(work)]
    measure("benchmarks.hf_weights.worker", 1, ["--mode", "save", *arguments])
    (export,) = measure("benchmarks.hf_weights.worker", 1, ["--mode", "export", *arguments])
    size = sum(path.stat().st_size for path in (work / "out").glob("*.safetensors")) / 1e6
    print(
        f"| {name} | export, one process | {size:.0f} | | {export['peak']:.0f} | | "
        f"{export['seconds']:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
