"""The config for pipemega with the same GPT and batch as the other systems."""

from typing import Any

from benchmarks.pipeline_cpu.model import Sizes

# In elements; gives about a dozen buckets.
BUCKET = 1e6


def config_of(sizes: Sizes, dtype: str, kind: str) -> dict[str, Any]:
    """Return the config.

    Args:
        kind: "PxD", "PxD/SCHEDULE" or "PxD@auto" with P pipeline and D data ranks; with "@auto"
            the layers are divided by time, the default of pipemega, and else by parameters.
    """
    kind, _, partition = kind.partition("@")
    mesh, _, schedule = kind.partition("/")
    pipeline, data = map(int, mesh.split("x"))
    return {
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.num_microbatches // data,
        "gradient_clipping": 0.0,
        "mesh": {"pipeline": pipeline, "data": data, "device": "cpu", "keep_cpu_memory": False},
        "pipeline": {"schedule": schedule or "1f1b", "partition": partition or "parameters"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET},
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": sizes.lr, "weight_decay": sizes.weight_decay},
        },
        "model": {
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "seq_length": sizes.seq,
            "vocab_size": sizes.vocab,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "untie_embeddings_and_output_weights": True,
        },
    }
