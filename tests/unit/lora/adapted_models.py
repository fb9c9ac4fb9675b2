"""Small models for the tests of adapters; they need transformers only where they use it."""

from typing import Any

import torch
from torch import Tensor

import pipemega
from pipemega.engine.engine import Engine
from pipemega.models import GPTConfig, gpt

VOCAB, LENGTH = 48, 12
TRAIN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(VOCAB, (2, 2, LENGTH), generator=generator)
    return ids, labels


def hf_model(family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH,
            resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def engine_of(net: Any, **config: Any) -> Engine:
    engine, *_ = pipemega.initialize(net, TRAIN | config)
    return engine


def logits_of(engine: Engine) -> Tensor:
    outputs = engine.infer([batch()[0]])
    assert outputs is not None
    logits: Tensor = outputs[0][..., :VOCAB]
    return logits


@torch.no_grad()
def hf_logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(batch()[0]).logits
    return logits


def gpt_engine(style: str, **config: Any) -> Engine:
    model = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": LENGTH,
        "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip
    if style == "llama":
        model |= {
            "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
            "ffn_hidden_size": 24, "add_bias_linear": False, "num_query_groups": 2,
            "untie_embeddings_and_output_weights": True,
        }  # fmt: skip
    loaded = pipemega.load_config(TRAIN | {"model": model} | config)
    engine, *_ = pipemega.initialize(gpt(GPTConfig.of(loaded, VOCAB)), loaded)
    return engine
