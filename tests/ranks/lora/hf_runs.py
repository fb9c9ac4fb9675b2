"""Trains a model of transformers with LoRA on any mesh."""

from typing import Any

import torch
from torch import Tensor

from pipemega import initialize
from pipemega.hf.hf_module import from_pretrained
from pipemega.hf_check.split_run import KeepFloat64

VOCAB, LENGTH, MICRO = 48, 8, 2


def config_of(family: str) -> Any:
    import transformers

    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=4, n_positions=LENGTH, resid_pdrop=0,
            attn_pdrop=0, embd_pdrop=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        return transformers.Qwen3MoeConfig(**sizes, **experts, router_aux_loss_coef=0.0)
    return transformers.Qwen3Config(**sizes)


def microbatch(step: int, place: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + place)
    ids, labels = torch.randint(VOCAB, (2, MICRO, LENGTH), generator=generator)
    return ids, labels


def train(family: str, *, sequence_parallel: bool = False, **config: Any) -> dict[str, Any]:
    """Return losses, norms and parameters of two steps."""
    torch.set_default_dtype(torch.float64)
    try:
        net = from_pretrained(
            config_of(family), pretrained=False, sequence_parallel=sequence_parallel
        )
        engine, *_ = initialize(
            net,
            {
                "train_micro_batch_size_per_gpu": MICRO,
                "train_batch_size": 4 * MICRO,
                "gradient_clipping": 0.0,
                "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                **config,
            },
        )
        steps, ranks = [], engine.mesh.data.size
        for step in range(2):
            given = [
                microbatch(step, m * ranks + engine.mesh.data.rank)
                for m in range(engine.batch.num_microbatches)
            ]
            loss = engine.train_batch(iter(given))
            assert engine.last_step is not None
            steps.append((loss, engine.last_step.grad_norm))
        parameters = {n: p.numpy() for n, p in engine.parameter_state().items()}
        return {"steps": steps, "parameters": parameters}
    finally:
        torch.set_default_dtype(torch.float32)


def train_all(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    with KeepFloat64():
        return [train(family, **config) for family, config in cases]
