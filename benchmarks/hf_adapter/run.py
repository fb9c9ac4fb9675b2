"""Compares one training step of a Llama: transformers alone, the adapter, and our GPT.

All have the same shape and run in one process, in turns, with one thread. Reported is the smallest
CPU time of a step, because other processes may use the machine.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import pipemega

MICRO, NUM_MICROBATCHES = 2, 4


def llama_config(arguments: argparse.Namespace) -> Any:
    return transformers.LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 128,
        intermediate_size=arguments.hidden * 11 // 4,
        max_position_embeddings=arguments.length,
        tie_word_embeddings=False,
    )


def engine_config(arguments: argparse.Namespace, **keys: Any) -> dict[str, Any]:
    return {
        "train_batch_size": MICRO * NUM_MICROBATCHES,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 1.0,
        "mesh": {"device": "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    } | keys


def data(arguments: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (MICRO, arguments.length + 1)
    tokens = [
        torch.randint(arguments.vocab, shape, generator=generator) for _ in range(NUM_MICROBATCHES)
    ]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def plain_step(arguments: argparse.Namespace) -> Callable[[Iterator[Any]], None]:
    """A loop as a user of transformers writes it."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(llama_config(arguments))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(micro_batches: Iterator[Any]) -> None:
        for tokens, labels in micro_batches:
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / NUM_MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adapter_step(arguments: argparse.Namespace) -> Callable[[Iterator[Any]], Any]:
    net = pipemega.from_pretrained(llama_config(arguments), pretrained=False)
    engine, *_ = pipemega.initialize(net, engine_config(arguments))
    return engine.train_batch


def gpt_step(arguments: argparse.Namespace) -> Callable[[Iterator[Any]], Any]:
    from pipemega.config import load
    from pipemega.models import GPTConfig, gpt

    c = llama_config(arguments)
    model = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "ffn_hidden_size": c.intermediate_size,
        "seq_length": arguments.length,
        "vocab_size": c.vocab_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    config = load(engine_config(arguments, model=model))
    engine, *_ = pipemega.initialize(gpt(GPTConfig.of(config, c.vocab_size)), config)
    return engine.train_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = {
        "transformers": plain_step(arguments),
        "adapter": adapter_step(arguments),
        "our GPT": gpt_step(arguments),
    }
    batches = data(arguments)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step(iter(batches))
            times[name].append(time.process_time() - start)
    best = {name: min(values[1:]) for name, values in times.items()}
    tokens = MICRO * NUM_MICROBATCHES * arguments.length
    for name, seconds in best.items():
        share = tokens / seconds / (tokens / best["our GPT"])
        print(f"{name:14} {tokens / seconds:8.0f} tokens/s {share:8.1%} of our GPT")
    print(json.dumps({"arguments": vars(arguments), "seconds": best}))


if __name__ == "__main__":
    main()
